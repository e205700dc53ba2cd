"""The drill draws the same rounds from a seed, and finds the rounds that do not end right."""

import re
import signal
import sys
from hashlib import sha256

import psutil
import pytest
import torch
from harness import ROOT, Result, Running, run, wait_until
from judge import Wrong, check_broken, check_equal
from plan import Plan, draw
from report import report
from rounds import RESUMED, STARTED_OVER, TOO_LATE, WENT_ON, WRONG, Job, RoundResult

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


def plan(fault, place="step", nth=30, **options):
    chosen = {"number": 1, "launcher": "spawn", "restarts": 0, "rank": 0, "to_all": False}
    return Plan(fault=fault, place=place, nth=nth, **chosen | {"delay": 0, "share": 0.5} | options)


RESTARTED = {"launcher": "torchrun", "restarts": 1}


@pytest.mark.parametrize(
    ("broken", "code", "text", "said"),
    [
        (plan("kill"), -9, "terminated with signal SIGKILL", None),
        (plan("kill"), -9, "Connection closed by peer", "exit code -9 without a clear error"),
        (plan("kill"), 1, "SIGKILL\nterminate called after throwing", "has crashed"),
        (plan("kill"), 1, "SIGKILL\nsrun: error: node1: task 0: Bus error", "has crashed"),
        (plan("kill", **RESTARTED), 1, "failed (exitcode: -15) local_rank: 1", "without a clear"),
        (plan("exception"), 0, "", "exit code 0 without"),
        (plan("pause"), 0, "", None),
        (plan("pause"), 1, "Timed out", "exit code 1 without"),
        (plan("full disk", "save", 2), 0, "", "exit code 0 without"),
        (plan("full disk", "save", 6), 0, "", None),  # it had more than the newest three
        (plan("terminate"), 143, "ended by a signal at step 31", None),
        (plan("terminate"), 143, "ended by a signal at step 32", "lost step_000000032.pt"),
        (plan("terminate"), 1, "ended by a signal at step 31", "exit code 1, not 143"),
        (plan("terminate", "load"), 1, "closing signal SIGTERM", "exit code 1 without"),
    ],
)
def test_a_job_must_name_the_cause_and_not_crash(broken, code, text, said):
    saved = {"step_000000031.pt"}
    for result in (Result("", text, code), Result(text, "", code)):
        if said is None:
            check_broken(broken, result, saved, saved, hit=True)
            continue
        with pytest.raises(Wrong, match=said):
            check_broken(broken, result, saved, saved, hit=True)


@pytest.mark.parametrize(
    "other",
    [torch.tensor([-0.0, 1]), torch.tensor([0.0, 1]).view(torch.int32), torch.tensor([[0.0, 1]])],
    ids=["minus zero", "dtype", "shape"],
)
def test_weights_are_compared_bit_for_bit(other):
    weights = {"weight": torch.tensor([0.0, 1]), "count": torch.tensor(2.0)}
    check_equal(weights | {"weight": torch.tensor([0.0, 9, 1])[::2]}, weights, "equal ones")
    with pytest.raises(Wrong, match="others: not equal"):
        check_equal(weights | {"weight": other}, weights, "others")


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_table_counts_outcomes_and_costs():
    kill, restarted = plan("kill"), plan("kill", **RESTARTED)
    rounds = [RoundResult(kill, RESUMED, 1.0, 7), RoundResult(restarted, RESUMED, 3.0, 0)]
    rounds += [RoundResult(kill, STARTED_OVER, 9.0, 23), RoundResult(kill, WENT_ON, steps=8)]
    rounds += [RoundResult(kill), RoundResult(kill, TOO_LATE)]
    counts, launchers, table = report(rounds).split("\n\n")
    assert counts == "6 rounds: 1 WRONG, 2 resumed, 1 started over, 1 too late, 1 went on."
    assert launchers == "By launcher: 5 spawn, 1 torchrun --max-restarts=1."
    row = ["kill", "6", "1", "2", "1", "1", "3.0 / 9.0 s", "8 / 23"]
    assert cells(table.splitlines()[-1]) == row


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


@pytest.mark.full
def test_an_interrupt_ends_the_running_rounds(tmp_path):
    """The first two possible rounds of this seed stop a rank, so they would last for a minute."""
    flags = ["--seed", "1328", "--rounds", "4", "--jobs", "2"]
    env = NO_SLURM | {"TMPDIR": str(tmp_path)}
    with Running(sys.executable, DRILL, *flags, cwd=tmp_path, env=env) as running:
        wait_until(lambda: [*tmp_path.glob("drill-*/round*/reached")], timeout=240)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(20).code == -signal.SIGINT

    def left():
        folders = [process.info["cwd"] or "" for process in psutil.process_iter(["cwd"])]
        return [folder for folder in folders if folder.startswith(str(tmp_path))]

    # A process that the drill has killed may still be exiting when the drill has ended.
    wait_until(lambda: not left(), timeout=10)
    assert not list(tmp_path.glob("drill-*"))


def run_round(folder, broken, lines):
    """Run a round of the job that these lines break."""
    job = Job(folder, defect=lines)
    job.run_fault_free([broken.launcher])
    return job.run_round(broken)


@pytest.mark.full
@pytest.mark.parametrize("lines", ["", "import atexit, time\natexit.register(time.sleep, 8)"])
def test_a_fault_after_the_last_checkpoint_is_an_outcome_of_its_own(tmp_path, lines):
    """Then the job has ended, or its rank lives on and shows nothing."""
    late = plan("kill", "save", 6, delay=3 if lines else 10, launcher="torchrun")
    assert run_round(tmp_path, late, lines) == RoundResult(late, TOO_LATE)


FORGETS = "from ddp_ref import Handler\nHandler.load = lambda self, path, keep=(): None"
FORGETS_IN_A_RESTART = """
import os
from ddp_ref import Handler
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
    Handler.load = lambda self, path, keep=(): None
"""
CHANGES_THE_WEIGHTS = """
from ddp_ref import Handler
load = Handler.load
def load_others(self, path, keep=()):
    load(self, path, keep)
    next(self.model.parameters()).data.mul_(1.000001)
Handler.load = load_others
"""
SAVES_NO_EPOCH = "from ddp_ref import Checkpoint\nCheckpoint.on_epoch_end = lambda self: None"
RAISES = plan("exception", "validation", 3)


DEFECTS = {
    "does not resume": (RAISES, FORGETS, "and had to log 'step_000000046.pt: epoch '"),
    "does not resume in a restart": (
        plan("exception", **RESTARTED),
        FORGETS_IN_A_RESTART,
        "restarted by torchrun without loading step_000000023.pt",
    ),
    "changes the weights": (RAISES, CHANGES_THE_WEIGHTS, "the weights at the end: not equal"),
    "saves only at the end": (RAISES, SAVES_NO_EPOCH, "lost step_000000023.pt, step_000000046.pt"),
}


@pytest.mark.full
@pytest.mark.parametrize(("broken", "lines", "said"), DEFECTS.values(), ids=DEFECTS)
def test_a_defect_of_the_job_is_found(tmp_path, broken, lines, said):
    result = run_round(tmp_path, broken, lines)
    assert result.outcome == WRONG and said in result.detail
