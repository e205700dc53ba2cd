"""The soak: both runs end at the same weights and no process grows, or it says what is wrong."""

import argparse
import itertools
import json
import math
import shlex
import sys

import attempts
import pytest
import soak
import torch
from harness import ROOT, run
from judge import Wrong
from memory import growth

from ddp_ref.training import checkpoint

SOAK = ROOT / "drill" / "soak.py"
SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--batch-size", "64", "--length", "9"]
RARE = ["--epochs", "30", "--every", "3", "--faults", "2"]
SIGTERM = "SIGTERM to the launcher"
SCRIPT = """
import ctypes, os, signal, sys, time
from pathlib import Path
from ddp_ref.training import checkpoint

epochs, home, defect = int(sys.argv[2]), Path(sys.argv[4]), sys.argv[5]
home.mkdir(exist_ok=True)
newest = checkpoint.numbered(home)[-1:]
done = checkpoint.step_of(newest[0]) if newest else 0
log = f"loaded {newest[0]}: epoch {done}" if newest else f"no checkpoint in {home}: from scratch"
(home / "log.txt").write_text("no checkpoint in run: " if defect == "starts over" else log)
if defect in ("ignores SIGTERM", "is slow to exit"):
    signal.signal(signal.SIGTERM, lambda *_: (home / "signalled").touch())
print("epochs are done", flush=True)
for epoch in range(done + 1, epochs + 1):
    time.sleep(1 if defect == "is slow to exit" else 0.2)
    checkpoint.write(home / checkpoint.NAME.format(epoch), {"epoch": epoch})
    if defect == "hangs":
        time.sleep(10)
if defect == "leaves half a file":
    (home / checkpoint.NAME.format(epochs + 1)).write_bytes(b"PK")
if defect == "is slow to exit":
    time.sleep(2)
if defect == "fails":
    sys.exit(1)
if defect == "segfaults":
    ctypes.string_at(0)
if defect == "has a rank that crashes late" and not os.fork():
    time.sleep(1)
    print("terminate called")
"""


def run_soak(folder, *flags, seed=706):
    """Run thirty epochs with two faults: SIGTERM under torchrun, then to the parent of --nproc."""
    command = [sys.executable, SOAK, *RARE, "--seed", str(seed), *flags, "--", *SMALL]
    return run(*command, cwd=folder, timeout=400)


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Return a function that starts SCRIPT once, with a defect; the only fault is SIGTERM."""
    (tmp_path / "char_gpt.py").write_text(SCRIPT)
    for name, value in {"SCRIPTS": tmp_path, "SAMPLE": 0.05}.items():
        monkeypatch.setattr(attempts, name, value)
    monkeypatch.setattr(attempts, "FAULTS", [SIGTERM])

    def run_once(defect, epochs=3, every=math.inf):
        if defect == "hangs":
            monkeypatch.setattr(attempts, "STUCK", 3)  # too short for the others on a busy machine
        args = argparse.Namespace(seed=0, epochs=epochs, flags=[defect])
        return attempts.run_once(args, tmp_path, 1, every)  # 1: with --nproc, so without torchrun

    return run_once


def save(folder, epoch, weight=0.0, loss=0.5):
    state = {"epoch": epoch, "step": 10 * epoch, "model": {"weight": torch.tensor(weight)}}
    state["history"] = {"train_loss": [loss] * epoch}
    checkpoint.write(folder / checkpoint.NAME.format(epoch), state)


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        ({0: 100, 60: 180}, None),  # the process has not lived long enough
        ({0: 100, 60: 200, 120: 205, 150: 205}, 5),
        ({0: 100, 60: 200, 600: 250, 630: 200, 3600: 200}, 0),  # a peak in between is no growth
        ({0: 100, 60: 200, 3570: 200, 3590: 400, 3595: 200, 3600: 200}, 0),  # nor a late one
        ({0: 100, 30: 400, 40: 101, 1800: 390, 3600: 390}, 289),  # an early peak does not hide it
    ],
)
def test_growth_is_from_the_second_minute_to_the_end(mib, expected):
    times = range(max(mib) + 1)
    steps = [mib[max(when for when in mib if when <= time)] for time in times]
    assert growth(list(zip(times, steps, strict=True))) == expected


@pytest.mark.parametrize("every", [4, math.inf])  # with faults, and without any
def test_a_hang_is_found_even_if_the_next_fault_would_end_it(attempt, every):
    with pytest.raises(Wrong, match=r"no new checkpoint for 3 s"):
        attempt("hangs", every=every)


def test_a_hang_after_a_pause_is_found_even_if_a_save_was_in_flight(attempt, tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "FAULTS", [attempts.PAUSE])
    epochs = itertools.count(9)
    monkeypatch.setattr(attempts, "inject", lambda *_: save(tmp_path / "run", next(epochs)))
    with pytest.raises(Wrong, match="no new checkpoint"):
        attempt("hangs", epochs=2, every=0.01)


@pytest.mark.parametrize("start", ["", "step_000000002.pt"])
def test_the_job_must_start_from_the_newest_checkpoint(attempt, tmp_path, start):
    if start:
        save(tmp_path / "run", 2)
    assert attempt("none").start == start
    save(tmp_path / "run", 4)
    with pytest.raises(Wrong, match=r"did not begin with step_000000004\.pt"):
        attempt("starts over", epochs=6)


def test_half_a_checkpoint_is_found(attempt):
    with pytest.raises(Wrong, match=r"^damaged: step_000000004\.pt$"):
        attempt("leaves half a file")


@pytest.mark.parametrize("defect", ["segfaults", "has a rank that crashes late"])
def test_a_crash_is_found(attempt, defect):
    with pytest.raises(Wrong, match="something has crashed"):
        attempt(defect)


def test_a_job_that_fails_just_before_a_fault_is_found(attempt, monkeypatch):
    monkeypatch.setattr(attempts, "train", lambda *_: True)  # the next fault is due
    with pytest.raises(Wrong, match="no fault, but exit code 1"):
        attempt("fails", epochs=1, every=1000)  # up to 100 s until the fault


def test_a_fault_that_ends_the_job_counts(attempt):
    ended = attempt("none", epochs=20, every=0.5)
    assert ended.faults == [SIGTERM] and ended.code == -15 and ended.ended < 10


def test_a_fault_after_the_last_epoch_does_not_count_if_the_job_succeeds(attempt, tmp_path):
    ended = attempt("is slow to exit", epochs=1, every=0.1)
    assert (tmp_path / "run" / "signalled").exists()
    assert ended.faults == [] and ended.code == 0 and ended.ended is None


def test_a_job_that_ignores_a_fault_is_found(attempt):
    with pytest.raises(Wrong, match=f"the job ignored {SIGTERM}"):
        attempt("ignores SIGTERM", epochs=15, every=0.5)


MEASURED = {"launcher": 0.1, "rank 0": 0.2, "rank 1": 0.3}
NPROC = "with-faults, --nproc"


def runs(folder, growths=MEASURED, trained=700.0):
    """Return two complete runs in `folder`. `growths` are those of the last attempt."""
    whole = attempts.Attempt("torchrun", "", trained=trained, growths=MEASURED)
    short = attempts.Attempt("--nproc", "", code=1, trained=60, ended=2, faults=["Ctrl-C"])
    last = attempts.Attempt("--nproc", "step_000000001.pt", trained=trained, growths=growths)
    whole.peaks, last.peaks = dict.fromkeys(MEASURED, 8.0), dict.fromkeys(growths, 9.0)
    for name in (soak.FAULT_FREE, soak.WITH_FAULTS):
        save(folder / name / "run", 5)
    return {soak.FAULT_FREE: [whole], soak.WITH_FAULTS: [short, last]}


def settings(folder, **changes):
    chosen = {"seed": 1, "epochs": 5, "every": 120.0, "faults": math.inf, "flags": []}
    return argparse.Namespace(folder=folder, **chosen | changes)


def test_both_runs_must_end_after_the_last_epoch_with_the_same_weights(tmp_path):
    args, two = settings(tmp_path), runs(tmp_path)
    assert soak.problems(args, two) == []
    save(tmp_path / soak.WITH_FAULTS / "run", 5, weight=1.0)
    (problem,) = soak.problems(args, two)
    assert problem.startswith("the weights at the end, step 50: not equal")
    save(tmp_path / soak.WITH_FAULTS / "run", 5, loss=0.4)
    (problem,) = soak.problems(args, two)
    assert problem.startswith("history at the end: {'train_loss': [0.4, 0.4")
    for name in two:
        (tmp_path / name / "run" / checkpoint.NAME.format(5)).unlink()
        save(tmp_path / name / "run", 4)
    (problem,) = soak.problems(args, two)
    assert problem == "with-faults: the last checkpoint is of epoch 4, not 5"


@pytest.mark.parametrize(
    ("growths", "seconds", "expected"),
    [
        (MEASURED | {"rank 1": 20.5}, 700, [f"{NPROC}: rank 1 grew by 20.5 MiB, more than 20"]),
        (MEASURED | {"rank 1": None}, 700, [f"{NPROC}: rank 1 was not measured for growth"]),
        ({}, 700, [f"{NPROC}: {name} was not measured for growth" for name in MEASURED]),
        ({}, 60, []),  # the whole run is short
    ],
)
def test_the_growth_of_each_process_must_be_measured_and_small(
    tmp_path, growths, seconds, expected
):
    found = soak.problems(settings(tmp_path), runs(tmp_path, growths, seconds))
    assert found == expected


def test_the_report_has_the_process_that_grew_most(tmp_path):
    """It says how many attempts were measured, of the process with the fewest."""
    text = soak.report(settings(tmp_path), runs(tmp_path, MEASURED | {"rank 1": None}))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[-2:]]
    assert rows == [
        ["fault-free", "torchrun", "1 of 1", "8 MiB", "0.3 MiB"],
        ["with-faults", "--nproc", "0 of 2", "9 MiB", "0.2 MiB"],
    ]
    assert soak.report(settings(tmp_path), runs(tmp_path, {})).endswith(
        "| 0 of 2            | 0 MiB |         |"
    )


@pytest.mark.parametrize("flags", [["--faults", "2", "--every", "2.5"], ["--seed", "12345678"]])
def test_the_command_in_the_report_repeats_the_run(monkeypatch, flags):
    monkeypatch.setattr(sys, "argv", ["soak.py", *flags, "--", *SMALL])
    args = soak.parse()
    monkeypatch.setattr(sys, "argv", shlex.split(soak.command_line(args))[1:])
    assert soak.parse() == args


def test_running_again_cannot_make_an_error_good(tmp_path):
    file = tmp_path / "runs" / "soak" / "fault-free" / "attempts.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("no JSON")
    first = run_soak(tmp_path)
    assert first.code == 1 and first.stderr.startswith("WRONG: Expecting value")
    again = run_soak(tmp_path)
    assert again.code == 1 and again.stderr.startswith("error: a run failed before, see ")


def test_a_run_of_code_that_has_changed_meanwhile_does_not_go_on(tmp_path, monkeypatch):
    args = settings(tmp_path)
    soak.check_settings(args)
    soak.check_settings(args)
    monkeypatch.setattr(soak, "code_version", lambda: "0123")
    with pytest.raises(SystemExit, match="give another --folder"):
        soak.check_settings(args)


@pytest.mark.full
def test_a_run_with_faults_ends_at_the_same_weights_and_a_difference_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\n".join(soak.MARKS) + "\nafter")
    ended = run_soak(tmp_path, "--markdown", page)
    assert ended.code == 0, ended.stdout + ended.stderr
    first, second, last = [line for line in ended.stdout.splitlines() if line[:6] == "with-f"]
    assert "| torchrun | from scratch" in first and "| --nproc | from step_" in second
    assert all("| SIGTERM to the launcher | exit code " in line for line in (first, second))
    assert "| torchrun | from step_" in last and "| no fault | exit code 0" in last
    assert "ended at the same weights and history, bit for bit" in page.read_text()

    # No attempt is made again, but the results are compared again.
    folder = tmp_path / "runs" / "soak"
    file = folder / "with-faults" / "attempts.jsonl"
    *_, newest = sorted((folder / "fault-free" / "run").glob("step_*.pt"))
    state = torch.load(newest)
    state["model"]["places.weight"][0, 0] += 1e-6
    torch.save(state, newest)
    grown = json.loads(file.read_text().splitlines()[-1])
    grown["growths"]["rank 1"] = 20.5
    file.write_text(json.dumps(grown) + "\n")
    again = run_soak(tmp_path)
    assert again.code == 1 and again.stdout == ""
    growing, weights = again.stderr.splitlines()
    assert growing == "WRONG: with-faults, torchrun: rank 1 grew by 20.5 MiB, more than 20"
    assert weights.startswith("WRONG: the weights at the end, step ") and "not equal" in weights

    other = run_soak(tmp_path, seed=0)
    assert other.code == 1 and other.stderr.startswith("error: ")
    assert other.stderr.endswith(": give another --folder\n") and other.stderr.count("\n") == 1
