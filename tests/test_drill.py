"""The drill draws the same rounds from a seed, and finds the rounds that do not end right."""

import re
from hashlib import sha256

import pytest
from harness import ROOT
from plan import Plan, draw
from rounds import RESUMED, STARTED_OVER, TOO_LATE, WENT_ON, WRONG, Job


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
