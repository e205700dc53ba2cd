"""The drill draws the same rounds from a seed, ends them right, and can see one that is wrong."""

import sys

import pytest
from harness import ROOT, SCRIPTS, run

DRILL = ROOT / "drill" / "drill.py"
SEED = "5"


def drill(folder, *flags, **env):
    return run(sys.executable, DRILL, "--seed", SEED, *flags, cwd=folder, timeout=280, env=env)


def test_a_round_is_drawn_from_the_seed_and_its_number(tmp_path):
    few, many, one = (
        drill(tmp_path, "--plan", "--launchers", "spawn", "--faults", "kill", "flip", *flags).stdout
        for flags in (["--rounds", "3"], ["--rounds", "30"], ["--only", "30"])
    )
    assert len(set(many.splitlines())) == 30
    assert many.splitlines()[:3] == few.splitlines() and many.splitlines()[29] == one.strip()


def test_a_round_that_is_not_possible_is_left_out_and_no_other_changes(tmp_path):
    nowhere = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    faults = ["--plan", "--faults", "kill", "flip"]
    ended = drill(tmp_path, *faults, "--rounds", "30", **nowhere)
    reason, *rounds = ended.stdout.splitlines()
    assert reason.startswith("left out: srun: no Slurm cluster answers") and len(rounds) == 30
    assert not any("srun" in line for line in rounds)
    numbers = [int(line.split()[1]) for line in rounds]
    missing = min(set(range(1, 31)) - set(numbers))
    alone = drill(tmp_path, *faults, "--only", str(missing), **nowhere)
    assert alone.code == 1 and f"error: round {missing} is left out here: srun |" in alone.stderr


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


FORGETS = "from ddp_ref import Handler\nHandler.load = lambda self, path: None"
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal = lambda number, handler: None
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "number", "lines", "said"),
    [
        ("exception", 1, FORGETS, "it was to begin with"),
        ("terminate", 7, DEAF, "exit code 0 without a clear error"),  # to rank 1, as it saves
    ],
    ids=["does not resume", "is deaf"],
)
def test_a_job_that_ends_wrong_is_found(tmp_path, fault, number, lines, said):
    script = tmp_path / "broken.py"
    text = (SCRIPTS / "train_reference.py").read_text()
    line = "def classifier("
    assert text.count(line) == 1
    script.write_text(text.replace(line, f"{lines}\n\n\n{line}"))
    flags = ["--launchers", "spawn", "--faults", fault, "--script", script]
    ended = drill(tmp_path, *flags, "--only", str(number))
    assert ended.code == 1, ended.stderr
    assert "| WRONG |" in ended.stdout and said in ended.stdout
    again = [".venv/bin/python", "drill/drill.py", "--seed", SEED, *map(str, flags)]
    assert f"WRONG: {' '.join(again)} --only {number}\n" in ended.stdout
