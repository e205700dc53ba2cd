"""The soak: both runs end at the same weights and no process grows, or it says what is wrong."""

import json
import sys

import pytest
import torch
from harness import ROOT, run
from memory import growth

SOAK = ROOT / "drill" / "soak.py"
SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--batch-size", "64", "--length", "9"]
MARKS = "<!-- begin of what the soak has written -->", "<!-- end of the soak -->"


def soak(folder, *flags, seed=389):
    """Run thirty epochs with two faults: SIGTERM under torchrun, then to the parent of --nproc."""
    rare = ["--epochs", "30", "--every", "3", "--faults", "2", "--seed", str(seed)]
    return run(sys.executable, SOAK, *rare, *flags, "--", *SMALL, cwd=folder, timeout=400)


@pytest.mark.parametrize(
    ("seconds", "mib", "expected"),
    [
        ([0, 30, 60], [100, 180, 200], None),  # the process has not lived longer than a minute
        ([0, 30, 90], [100, 200, 205], 5),
        ([0, 60, 600, 3600], [100, 200, 250, 200], 0),  # a peak in between is no growth
        ([0, 60, 600, 3600], [100, 200, 210, 230], 30),
    ],
)
def test_growth_is_from_the_first_minute_to_the_last(seconds, mib, expected):
    assert growth(list(zip(seconds, mib, strict=True))) == expected


@pytest.mark.full
def test_a_run_with_faults_ends_at_the_same_weights_and_a_difference_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\n".join(MARKS) + "\nafter")
    ended = soak(tmp_path, "--markdown", page)
    assert ended.code == 0, ended.stdout + ended.stderr
    first, second, last = [line for line in ended.stdout.splitlines() if line[:6] == "broken"]
    assert "| torchrun | from scratch" in first and "| --nproc | from step_" in second
    assert all("| SIGTERM to the launcher | exit code " in line for line in (first, second))
    assert "| torchrun | from step_" in last and "| no fault | exit code 0" in last
    assert "ended at the same weights, bit for bit" in page.read_text()

    # Nothing is played again, but the results are compared again.
    folder = tmp_path / "runs" / "soak"
    lives = folder / "broken" / "lives.jsonl"
    *_, newest = sorted((folder / "unbroken" / "run").glob("step_*.pt"))
    state = torch.load(newest)
    state["model"]["places.weight"][0, 0] += 1e-6
    torch.save(state, newest)
    grown = json.loads(lives.read_text().splitlines()[-1])
    grown["growths"]["rank 1"] = 20.5
    lives.write_text(json.dumps(grown) + "\n")
    again = soak(tmp_path)
    assert again.code == 1 and again.stdout == ""
    growing, weights = again.stderr.splitlines()
    assert growing == "WRONG: broken 1: rank 1 grew by 20.5 MiB, more than 20"
    assert weights.startswith("WRONG: the weights at the end, step ") and "not equal" in weights

    other = soak(tmp_path, seed=0)
    assert other.code == 1 and other.stderr.startswith("error: ")
    assert other.stderr.endswith(": give another --folder\n") and other.stderr.count("\n") == 1
