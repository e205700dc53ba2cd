"""The ladder of scripts: each is short, has the same names in the same order, and adds one idea."""

import ast
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from harness import ROOT, SCRIPTS, run

# The most lines that each may have, and the most that its step may add and remove.
LADDER = {
    "single_gpu": (75, None),
    "multigpu_spawn": (105, (45, 15)),
    "multigpu_torchrun": (112, (30, 22)),
    "multinode_slurm": (132, (24, 3)),
}
FIRST = ["Trainer", "Trainer.__init__", "Trainer._run_batch", "Trainer._run_epoch"]
FIRST += ["Trainer._save_checkpoint", "Trainer.train"]
FIRST += ["load_train_objs", "prepare_dataloader", "main"]


def source(script):
    return (SCRIPTS / f"{script}.py").read_text()


def definitions(script):
    """Return the names of classes, methods and functions in the order of the file."""
    names = []
    for node in ast.parse(source(script)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        if isinstance(node, ast.ClassDef):
            names += [f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)]
    return names


def test_the_scripts_are_short():
    assert len((ROOT / "datautils.py").read_text().splitlines()) <= 103
    for script, (most, _) in LADDER.items():
        assert len(source(script).splitlines()) <= most, script


def lines_changed(before, after):
    """Return how many lines a step of the ladder adds and removes, as git counts them."""
    command = ["git", "diff", "--no-index", "--numstat"]
    command += [str(SCRIPTS / f"{name}.py") for name in (before, after)]
    numbers = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    return int(numbers[0]), int(numbers[1])


def test_a_step_changes_few_lines():
    for before, after in pairwise(LADDER):
        added, removed = lines_changed(before, after)
        most = LADDER[after][1]
        assert 0 < added <= most[0] and removed <= most[1], (after, added, removed)


def test_names_and_their_order():
    """All four have the tutorial series' names in the same order. A step only adds or renames."""
    assert definitions("single_gpu") == FIRST
    spawn = ["ddp_setup", *FIRST]
    assert definitions("multigpu_spawn") == spawn
    snapshot = [name.replace("_save_checkpoint", "_save_snapshot") for name in spawn]
    snapshot.insert(snapshot.index("Trainer._run_batch"), "Trainer._load_snapshot")
    assert definitions("multigpu_torchrun") == snapshot
    assert definitions("multinode_slurm") == ["read_slurm", *snapshot]


@pytest.mark.parametrize("script", LADDER)
def test_same_command_line(script, tmp_path):
    """It is that of the tutorial series, with at most two more flags."""
    shown = run(sys.executable, SCRIPTS / f"{script}.py", "--help", cwd=tmp_path).stdout
    names = re.findall(r"^  (\S+)", shown, re.MULTILINE)
    more = {"single_gpu": [], "multigpu_spawn": ["--nproc", "--share_gpus"]}
    expected = ["total_epochs", "save_every", "-h,", "--batch_size"]
    assert names == [*expected, *more.get(script, ["--share_gpus"])]


@pytest.mark.parametrize("word", ["gpu_id", "12355", "29500", "ddp_ref", "sys.path"])
def test_no_gpu_id_no_fixed_port_and_no_import_of_ours(word):
    assert [script for script in LADDER if word in source(script)] == []
