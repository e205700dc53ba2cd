"""The drill draws the same rounds from a seed, and finds the rounds that do not end right."""

import re
import sys
from hashlib import sha256

import pytest
from harness import ROOT, run
from plan import Plan, draw
from rounds import RESUMED, STARTED_OVER, TOO_LATE, WENT_ON, WRONG, Job

DRILL = ROOT / "drill" / "drill.py"
NO_SLURM = {"LOCAL_CLUSTER": "nowhere"}


def test_the_page_says_what_the_table_says():
    page = (ROOT / "docs" / "evidence.md").read_text()
    [written] = re.findall(r"^\d+ rounds: .*", page, re.M)
    outcomes = "rounds", WENT_ON, RESUMED, STARTED_OVER, TOO_LATE, WRONG
    counts = [n for outcome in outcomes for n in re.findall(rf"(\d+) {outcome}", written)]
    text = page.partition("\n## The fault drill\n\n")[2].partition("\n\n")[0]
    assert re.findall(r"\d+", text) == counts


def test_a_seed_draws_the_same_rounds_on_every_machine():
    """These are the rounds on the page."""
    plans = [repr(draw(5, number)) for number in range(1, 301)]
    assert sha256("\n".join(plans).encode()).hexdigest()[:16] == "b20f59bc2b082d4e"


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.mark.full
def test_rounds_end_right_and_the_table_shows_it(tmp_path):
    """Of this seed, round 1 needs Slurm, 2 flips a bit, and 3 raises an exception."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin of what the drill has written -->\nold\n<!-- end -->\nend")
    flags = ["--seed", "1649", "--rounds", "2", "--jobs", "2", "--markdown", page]
    ended = run(sys.executable, DRILL, *flags, cwd=tmp_path, timeout=540, env=NO_SLURM)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "rounds left out: srun needs the cluster that make slurm-up starts" in ended.stdout
    assert re.findall(r"^round (\d)", ended.stdout, re.M) == ["2", "3"]
    exception, flip = map(cells, ended.stdout.splitlines()[-2:])
    assert exception[:6] == ["exception", "1", "0", "1", "0", "0"]
    assert flip[:6] == ["flip", "1", "0", "1", "0", "0"]
    assert exception[-1] == "16 / 16"  # it raises before step 86, and the checkpoint is of step 69
    assert int(flip[-1].split()[0]) >= 23  # the damaged checkpoint was of an epoch
    text = page.read_text()
    assert ended.stdout[ended.stdout.index("2 rounds: ") :].strip() in text
    assert text.startswith("before") and text.endswith("end") and "old" not in text


CHANGES_THE_WEIGHTS = """
from ddp_ref import Handler
load = Handler.load
def load_others(self, path, keep=()):
    load(self, path, keep)
    next(self.model.parameters()).data.mul_(1.000001)
Handler.load = load_others
"""


@pytest.mark.full
def test_a_defect_of_the_job_is_found(tmp_path):
    raises = Plan(1, "spawn", 0, "exception", 0, False, "validation", 3, delay=0, share=0.5)
    job = Job(tmp_path, defect=CHANGES_THE_WEIGHTS)
    job.run_fault_free(["spawn"])
    result = job.run_round(raises)
    assert result.outcome == WRONG and "the weights at the end: not equal" in result.detail
