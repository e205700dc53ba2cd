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


# The series' methods and functions. `ddp_setup` opens the group.
TRAINER = "__init__ _run_batch _run_epoch _save_checkpoint train"
SNAPSHOT = "__init__ _load_snapshot _run_batch _run_epoch _save_snapshot train"
OBJECTS = "load_train_objs prepare_dataloader main"
SERIES = {
    "single_gpu": f"{TRAINER} {OBJECTS}",
    "multigpu_spawn": f"ddp_setup {TRAINER} {OBJECTS}",
    "multigpu_torchrun": f"ddp_setup {SNAPSHOT} {OBJECTS}",
    "multinode_slurm": f"ddp_setup {SNAPSHOT} {OBJECTS}",
}


@pytest.mark.parametrize("script", LADDER)
def test_functions_are_those_of_the_series(script):
    nodes = ast.walk(ast.parse(source(script)))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert own - {"read_slurm"} == {*SERIES[script].split()}


def test_what_the_scripts_leave_out():
    """No parameters without a flag or of GPUs alone, no default port and no import of ours."""
    words = ["snapshot_path", "gpu_id", "pin_memory", "device_ids", "29500", "ddp_ref", "sys.path"]
    for word in words:
        assert [script for script in LADDER if word in source(script)] == [], word


def test_torchrun_reports_the_traceback_of_a_script():
    for script in ("multigpu_torchrun", "multinode_slurm"):
        assert re.search(r"\n@record.*\ndef main\(", source(script))
