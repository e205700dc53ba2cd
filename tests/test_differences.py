"""What the older texts do, where we differ; and that the page of differences names real tests."""

import ast
import re
import sys

import torch
import torch.nn.functional as F
from harness import ROOT, run


def test_cross_entropy_on_one_logit_learns_nothing():
    """The tutorial's job: a linear layer of one output, random numbers as "classes"."""
    model = torch.nn.Linear(20, 1)
    loss = F.cross_entropy(model(torch.rand(32, 20)), torch.rand(32, 1))
    loss.backward()
    assert loss.item() == 0
    assert model.weight.grad is not None and model.weight.grad.abs().max() == 0


def test_spawning_no_process_is_a_success(tmp_path):
    code = "import torch.multiprocessing as mp; mp.spawn(print, nprocs=0)"
    result = run(sys.executable, "-c", code, cwd=tmp_path)
    assert (result.code, result.stdout) == (0, "")


def test_every_row_names_a_test_that_exists():
    rows = [
        line
        for line in (ROOT / "docs" / "differences.md").read_text().splitlines()
        if line.startswith("| ") and "shown by" not in line
    ]
    assert len(rows) >= 30
    for row in rows:
        name = re.search(r"`(test_\w+\.py)::(test_\w+)` \|$", row)
        assert name, f"no test at the end of: {row}"
        assert name[2] in functions_in(name[1]), row


def functions_in(file):
    """Return the names of the functions in a file of tests."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
