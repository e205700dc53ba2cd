"""The soak: both runs end at the same weights and no process grows, or it says what is wrong."""

import sys

import pytest
import soak
import torch
from attempts import Attempt, growth
from harness import ROOT, run
from judge import Wrong

from ddp_ref import checkpoint

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--batch-size", "64", "--length", "9"]


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        ({0: 100, 60: 180}, None),  # the process has not lived long enough
        ({0: 100, 60: 200, 120: 205, 150: 205}, 5),
        ({0: 100, 60: 200, 3570: 200, 3590: 400, 3595: 200, 3600: 200}, 0),  # a peak is no growth
        ({0: 100, 30: 400, 40: 101, 1800: 390, 3600: 390}, 289),  # an early peak does not hide it
    ],
)
def test_growth_is_from_the_second_minute_to_the_end(mib, expected):
    times = range(max(mib) + 1)
    steps = [mib[max(when for when in mib if when <= time)] for time in times]
    assert growth(list(zip(times, steps, strict=True))) == expected


@pytest.mark.parametrize(
    ("growths", "changed", "said"),
    [
        ({"launcher": 0.1, "rank 1": 20.0}, {}, None),
        ({"launcher": 0.1, "rank 1": 20.5}, {}, "with-faults, --nproc: rank 1 grew by 20.5 MiB"),
        ({}, {"model": {"weight": torch.tensor(1.0)}}, "the weights at the end: not equal"),
        ({}, {"history": {"train_loss": [0.4]}}, "history at the end: {'train_loss': "),
        ({}, {"epoch": 4}, "epoch at the end: 4, not 5"),
    ],
)
def test_both_runs_must_end_the_same_and_no_process_may_grow(tmp_path, growths, changed, said):
    state = {"epoch": 5, "step": 50, "history": {"train_loss": [0.5]}}
    state["model"] = {"weight": torch.tensor(0.0), "_extra_state": {"n_layer": 1}}
    for name, other in ((soak.FAULT_FREE, {}), (soak.WITH_FAULTS, changed)):
        checkpoint.write(
            tmp_path / name / "checkpoints" / checkpoint.NAME.format(50), state | other
        )
    attempts = [Attempt("--nproc", "", growths=growths)]
    runs = {soak.FAULT_FREE: [Attempt("torchrun", "")], soak.WITH_FAULTS: attempts}
    if said is None:
        assert soak.check(runs, tmp_path, 5) == 50
        return
    with pytest.raises(Wrong, match=said):
        soak.check(runs, tmp_path, 5)


@pytest.mark.full
def test_a_run_with_faults_ends_at_the_same_weights(tmp_path):
    """Of this seed, the first fault is SIGTERM under torchrun, the second one with --nproc."""
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\n".join(soak.MARKS) + "\nafter")
    flags = ["--epochs", "30", "--every", "3", "--faults", "2", "--seed", "706", "--markdown"]
    flags += [page, "--", *SMALL]
    ended = run(sys.executable, ROOT / "drill" / "soak.py", *flags, cwd=tmp_path, timeout=400)
    assert ended.code == 0, ended.stdout + ended.stderr
    first, second, *_, last = [row for row in ended.stdout.splitlines() if row[:6] == "with-f"]
    assert "| torchrun | from scratch" in first and "| --nproc | from step_" in second
    assert all("| SIGTERM to the launcher | exit code " in line for line in (first, second))
    assert "| from step_" in last and "| exit code 0" in last
    assert "Both runs ended at the same weights and history, bit for bit" in page.read_text()
