"""The ladder of scripts: each is short, has the same names in the same order, and adds one idea."""

import ast
import subprocess
import sys
from itertools import pairwise

import pytest
from harness import SCRIPTS, run
from lines_of_code import lines_of_code

LADDER = ["single_gpu", "multigpu_spawn", "multigpu_torchrun", "multinode_slurm"]
STEPS = list(pairwise(LADDER))
FIRST = [
    "Trainer",
    "Trainer.__init__",
    "Trainer._run_batch",
    "Trainer._run_epoch",
    "Trainer._evaluate",
    "Trainer._save_checkpoint",
    "Trainer.train",
    "load_train_objs",
    "prepare_dataloader",
    "main",
]


def source(script: str) -> str:
    return (SCRIPTS / f"{script}.py").read_text()


def definitions(script: str) -> list[str]:
    """Return the names of classes, methods and functions in the order of the file."""
    names = []
    for node in ast.parse(source(script)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        if isinstance(node, ast.ClassDef):
            names += [f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)]
    return names


@pytest.mark.parametrize("script", LADDER)
def test_at_most_150_lines_of_code(script):
    """Docstrings, comments and blank lines are not counted."""
    assert lines_of_code(source(script)) <= 150


def lines_changed(before: str, after: str) -> tuple[int, int]:
    """Return how many lines a step of the ladder adds and removes, as git counts them."""
    command = ["git", "diff", "--no-index", "--numstat"]
    command += [str(SCRIPTS / f"{name}.py") for name in (before, after)]
    numbers = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    return int(numbers[0]), int(numbers[1])


@pytest.mark.parametrize(("before", "after"), STEPS)
def test_a_step_changes_at_most_85_lines(before, after):
    assert 0 < sum(lines_changed(before, after)) <= 85


def test_names_and_their_order():
    """All four have the tutorial series' names in the same order. A step only adds or renames."""
    assert definitions("single_gpu") == FIRST
    spawn = ["ddp_setup", *FIRST]
    assert definitions("multigpu_spawn") == spawn
    snapshot = [name.replace("_save_checkpoint", "_save_snapshot") for name in spawn]
    snapshot.insert(snapshot.index("Trainer._run_batch"), "Trainer._load_snapshot")
    assert definitions("multigpu_torchrun") == snapshot
    snapshot.insert(snapshot.index("Trainer"), "share_snapshot")
    assert definitions("multinode_slurm") == ["adopt_slurm_step", *snapshot]


def test_same_flags(tmp_path):
    """All four take the same flags; spawn alone also says how many processes."""
    shown = {
        name: run(sys.executable, SCRIPTS / f"{name}.py", "--help", cwd=tmp_path).stdout
        for name in LADDER
    }
    flags = {
        name: [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
        for name, text in shown.items()
    }
    expected = "--epochs --batch-size --save-every --lr --seed --device --dataset --checkpoint"
    for name in LADDER:
        extra = ["--nproc"] if name == "multigpu_spawn" else []
        assert flags[name] == [*expected.split(), *extra]


@pytest.mark.parametrize("script", LADDER)
def test_no_gpu_id_and_no_fixed_port(script):
    """A rank is called a rank, and no port is fixed."""
    text = source(script)
    assert "gpu_id" not in text
    assert "12355" not in text and "29500" not in text
    assert "ddp_ref" not in text and "sys.path" not in text
