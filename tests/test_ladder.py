"""The ladder of scripts: each is short, has the tutorial series' names, and adds one idea."""

import ast
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from harness import ROOT, SCRIPTS, run

# The most lines that each may have, and the most that its step may add and remove.
LADDER = {
    "single_gpu": (72, None),
    "multigpu_spawn": (98, (42, 15)),
    "multigpu_torchrun": (106, (27, 19)),
    "multinode_slurm": (128, (24, 2)),
}


def source(script):
    return (SCRIPTS / f"{script}.py").read_text()


def test_the_scripts_are_short():
    assert len((ROOT / "datautils.py").read_text().splitlines()) <= 90
    assert len(source("train_reference").splitlines()) <= 60
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


@pytest.mark.parametrize("script", LADDER)
def test_same_command_line(script, tmp_path):
    """It is that of the tutorial series, and --nproc."""
    shown = run(sys.executable, SCRIPTS / f"{script}.py", "--help", cwd=tmp_path).stdout
    names = re.findall(r"^  (\S+)", shown, re.MULTILINE)
    more = ["--nproc"] if script == "multigpu_spawn" else []
    assert names == ["total_epochs", "save_every", "-h,", "--batch_size", *more]


# The parameters of the series' functions, without `self`.
TRAINER = {
    "__init__": "model train_data optimizer gpu_id save_every",
    "_run_batch": "source targets",
    "_run_epoch": "epoch",
    "_save_checkpoint": "epoch",
    "train": "max_epochs",
    "load_train_objs": "",
    "prepare_dataloader": "dataset batch_size",
}
SPAWN = {"main": "rank world_size save_every total_epochs batch_size"}
SNAPSHOT = {
    **{name: own for name, own in TRAINER.items() if name != "_save_checkpoint"},
    "__init__": "model train_data optimizer save_every snapshot_path",
    "ddp_setup": "",
    "_load_snapshot": "snapshot_path",
    "_save_snapshot": "epoch",
    "main": "save_every total_epochs batch_size snapshot_path",
}
SERIES = {
    "single_gpu": TRAINER | {"main": "device total_epochs save_every batch_size"},
    "multigpu_spawn": TRAINER | SPAWN | {"ddp_setup": "rank world_size"},
    "multigpu_torchrun": SNAPSHOT,
    "multinode_slurm": SNAPSHOT,
}
# Those of ours that differ. The page of differences has a row about each of these parameters.
WITH_TEST = "model train_data optimizer device save_every test_data"
OURS = {
    ("_load_snapshot", "snapshot_path"): "",
    ("main", SNAPSHOT["main"]): "save_every total_epochs batch_size",
}
OURS |= {("__init__", own["__init__"]): WITH_TEST for own in (TRAINER, SNAPSHOT)}


@pytest.mark.parametrize("script", LADDER)
def test_parameters_are_those_of_the_series_or_on_the_page(script):
    own = {
        node.name: " ".join(a.arg for a in node.args.args if a.arg != "self")
        for node in ast.walk(ast.parse(source(script)))
        if isinstance(node, ast.FunctionDef) and node.name != "read_slurm"
    }
    assert own == {name: OURS.get((name, given), given) for name, given in SERIES[script].items()}
    page = (ROOT / "docs" / "differences.md").read_text()
    assert all(f"`{name}`" in page for name in ("gpu_id", "test_data", "snapshot_path"))


def test_what_the_scripts_leave_out():
    """No parameters of GPUs alone, no default port of torchrun and no import of ours."""
    for word in ("gpu_id", "pin_memory", "device_ids", "29500", "ddp_ref", "sys.path"):
        assert [script for script in LADDER if word in source(script)] == [], word


def test_torchrun_reports_the_traceback_of_a_script():
    for script in ("multigpu_torchrun", "multinode_slurm"):
        assert re.search(r"\n@record.*\ndef main\(", source(script))
