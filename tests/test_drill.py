"""The drill draws the same rounds from a seed, ends them right, and can see one that is wrong."""

import sys

import pytest
from harness import ROOT, SCRIPTS, run

DRILL = ROOT / "drill" / "drill.py"
SEED = "5"


def drill(folder, *flags):
    return run(sys.executable, DRILL, "--seed", SEED, *flags, cwd=folder, timeout=280)


def test_a_round_is_drawn_from_the_seed_and_its_number(tmp_path):
    few, many, one = (
        drill(tmp_path, "--plan", "--launchers", "spawn", "torchrun", *flags).stdout
        for flags in (["--rounds", "3"], ["--rounds", "30"], ["--only", "30"])
    )
    assert len(set(many.splitlines())) == 30
    assert many.splitlines()[:3] == few.splitlines() and many.splitlines()[29] == one.strip()


@pytest.mark.full
def test_rounds_end_right_and_the_table_tells(tmp_path):
    """A checkpoint that is damaged after a kill, and an exception."""
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- begin of what the drill has written -->\nold\n<!-- end -->\nafter"
    )
    faults = ["--launchers", "spawn", "--faults", "flip", "exception"]
    ended = drill(tmp_path, *faults, "--rounds", "2", "--jobs", "2", "--markdown", page)
    assert ended.code == 0, ended.stdout + ended.stderr
    rows = [line for line in ended.stdout.splitlines() if line.startswith(("| flip", "| exc"))]
    assert len(rows) == 2 and all("1 resumed" in row for row in rows), ended.stdout
    assert set(rows) < set(page.read_text().splitlines())
    assert page.read_text().startswith("before") and page.read_text().endswith("after")
    assert "old" not in page.read_text()


@pytest.mark.full
def test_a_job_that_does_not_resume_is_found(tmp_path):
    script = tmp_path / "forgets.py"
    text = (SCRIPTS / "train_reference.py").read_text()
    line = "def classifier("
    assert text.count(line) == 1
    forgets = "from ddp_ref import Handler\nHandler.load = lambda self, path: None\n\n\n"
    script.write_text(text.replace(line, forgets + line))
    flags = ["--launchers", "spawn", "--faults", "exception", "--script", script]
    ended = drill(tmp_path, *flags, "--only", "1")
    assert ended.code == 1, ended.stderr
    assert "| WRONG |" in ended.stdout and "it was to begin with" in ended.stdout
    again = ["python", "drill/drill.py", "--seed", SEED, *map(str, flags), "--only", "1"]
    assert f"WRONG: {' '.join(again)}\n" in ended.stdout
