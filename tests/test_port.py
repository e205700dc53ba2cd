"""Four pages under docs/how-to show the clients' code as it is."""

import ast
import re
import textwrap

import pytest
import torch
from harness import ROOT

from datautils import MyTrainDataset
from ddp_ref import Handler, run_ranks

PAGES = [
    ROOT / "docs" / "how-to" / f"{name}.md" for name in ("port", "your-own-loop", "handler", "yaml")
]
FENCE = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(page):
    """Return the name in the first line of each fence, and the lines after it."""
    return FENCE.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_fence_is_a_part_of_a_tested_client(page):
    parts = [(name, code) for name, code in fences(page) if name != "yours.py"]
    assert len(parts) >= 2
    for name, code in parts:
        assert f"\n{code}" in (ROOT / name).read_text(), f"{page.name}: not in {name}:\n{code}"


def test_the_readers_own_code_is_python():
    for _, code in (fence for fence in fences(PAGES[0]) if fence[0] == "yours.py"):
        ast.parse(textwrap.dedent(code))


def test_muon_with_adamw_clips_schedules_and_resumes(tmp_path):
    (code,) = re.findall(
        r"^```python\n([^`]*class Both.*?)^```$", PAGES[0].read_text(), re.M | re.S
    )

    def train(folder, epochs):
        torch.manual_seed(0)
        exec(code, page := {})
        model, optimizer = page["model"], page["optimizer"]
        loss_fn = torch.nn.functional.cross_entropy
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        options = {"scheduler": schedule, "clip_norm": 1.0, "run_dir": tmp_path / folder}
        handler = Handler(model, optimizer, loss_fn, **options)
        handler.set_train_loader(MyTrainDataset(), batch_size=32)
        handler.load(tmp_path / folder)
        handler.train(epochs)
        return model[0].weight.detach()

    def train_whole_and_resumed():
        whole, _, resumed = train("whole", 3), train("stopped", 2), train("stopped", 3)
        return whole, resumed

    (first, *others), (one, other) = run_ranks(train_whole_and_resumed)
    assert all(torch.equal(weight, first) for weight in [*others, one, other])
