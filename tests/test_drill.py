"""The drill draws the same rounds from a seed, and finds the rounds that do not end right."""

import json
import re
import shutil
import signal
import sys
from contextlib import contextmanager

import moment
import psutil
import pytest
import report
import saved
import torch
from faults import LAST, inject
from harness import ROOT, SCRIPTS, Result, Running, run, wait_until
from judge import (
    Wrong,
    check_equal,
    check_kept,
    check_no_crash,
    check_output,
    check_restart,
    due_checkpoints,
)
from plan import PLACES, Plan
from report import table
from rounds import RESUMED, STARTED_OVER, TOO_LATE, WENT_ON, WRONG, Cost, Job, RoundResult

from ddp_ref.training.loop import TrainLoop

DRILL = ROOT / "drill" / "drill.py"
SEED = "5"


def drill(folder, *flags, **env):
    return run(sys.executable, DRILL, "--seed", SEED, *flags, cwd=folder, timeout=540, env=env)


def test_the_page_begins_with_what_the_table_says():
    page = (ROOT / "docs" / "fault-drill.md").read_text()
    headline = page.split("\n\n")[1]
    [written] = re.findall(r"^\d+ rounds: .*\d [\w ]+", page, re.M)
    counts = {words: number for number, words in re.findall(r"(\d+) ([a-z ]+)", written)}
    order = ["rounds", WENT_ON, RESUMED, STARTED_OVER]
    order += [outcome for outcome in counts if outcome not in order]  # such as TOO_LATE
    assert re.findall(r"\d+", headline) == [counts[outcome] for outcome in order]


def test_the_table_of_the_page_counts_the_saved_rounds():
    file = ROOT / "drill" / "results.jsonl"
    rounds = saved.load(file, current=json.loads(file.read_text().splitlines()[0])["version"])
    page = (ROOT / "docs" / "fault-drill.md").read_text()
    for text in (report.summary(rounds), report.launchers(rounds), table(rounds)):
        assert text in page


def test_a_round_is_drawn_from_the_seed_and_its_number(tmp_path):
    own = ["--plan", "--launchers", "spawn", "--faults", "kill", "flip"]
    few, many, one, other = (
        drill(tmp_path, *own, *flags).stdout.splitlines()
        for flags in (
            ["--rounds", "3"],
            ["--rounds", "30"],
            ["--only", "30"],
            ["--rounds", "30", "--seed", "6"],
        )
    )
    assert many[:3] == few and many[29:] == one
    texts, others = ([line.partition("|")[2] for line in lines] for lines in (many, other))
    assert len(set(texts)) > 25 and len(set(others)) > 25
    assert len(set(texts) & set(others)) < 5


def test_the_other_rounds_stay_the_same_if_some_are_impossible(tmp_path):
    nowhere = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    faults = ["--plan", "--faults", "kill", "flip"]
    ended = drill(tmp_path, *faults, "--rounds", "30", **nowhere)
    reason, *rounds = ended.stdout.splitlines()
    assert reason.startswith("without srun: it needs the cluster of make slurm-up")
    assert len(rounds) == 30
    assert not any("srun" in line for line in rounds)
    numbers = [int(line.split()[1]) for line in rounds]
    missing = min(set(range(1, 31)) - set(numbers))
    alone = drill(tmp_path, *faults, "--only", str(missing), **nowhere)
    assert (
        alone.code == 1
        and f"error: this machine cannot run round {missing}: srun |" in alone.stderr
    )


def plan(fault, place="step", nth=30, **options):
    chosen = {"number": 1, "launcher": "spawn", "restarts": 0, "rank": 0, "to_all": False}
    return Plan(fault=fault, place=place, nth=nth, **chosen | {"delay": 0, "share": 0.5} | options)


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ("123", "123", ""),
        ("123", "234", ""),  # a newer one has replaced the oldest
        ("12", "123", ""),
        ("123", "12", "3"),
        ("123", "13", "2"),
        ("123", "34", "2"),
        ("1", "", "1"),
    ],
)
def test_a_lost_checkpoint_is_found(before, after, lost):
    if not lost:
        check_kept(set(before), set(after))
        return
    with pytest.raises(Wrong, match=f"lost {lost}, left are"):
        check_kept(set(before), set(after))


@pytest.mark.parametrize(
    ("broken", "code", "text"),
    [
        (plan("kill"), -9, "terminated with signal SIGKILL"),
        (plan("kill", launcher="torchrun", restarts=1), 0, "failed (exitcode: -9) local_rank: 0"),
        (plan("kill", launcher="torchrun", restarts=1), 0, "failed (exitcode: -15) local_rank: 1"),
        (plan("exception"), 1, "RuntimeError: the drill's own on rank 0"),
        (plan("pause"), 0, ""),
        (plan("full disk", "save", 6), 0, ""),  # it had more than the newest three
        (plan("terminate"), 143, "ended by a signal at step 31"),
        (plan("terminate", launcher="torchrun"), 1, "ended by a signal at step 31"),
        # It was restarted, and newer checkpoints have replaced the one of step 30.
        (plan("terminate", launcher="torchrun", restarts=1), 0, "ended by a signal at step 30"),
    ],
)
def test_an_output_that_names_the_cause_passes(broken, code, text):
    saved = {f"step_00000003{n}.pt" for n in (1, 2, 3)}
    check_output(broken, Result("", text, code), saved, hit=True)


@pytest.mark.parametrize(
    ("broken", "code", "text", "said"),
    [
        (plan("kill"), -9, "Connection closed by peer", "exit code -9 without a clear error"),
        (plan("kill", launcher="torchrun"), 1, "failed (exitcode: -15) local_rank: 1", "without"),
        (plan("exception"), 0, "", "exit code 0 without"),
        (plan("kill", delay=0.5), 0, "", "exit code 0 without"),
        (plan("full disk", "save", 2), 0, "", "exit code 0 without"),
        (plan("full disk", "step", 130), 0, "", "exit code 0 without"),
        (plan("pause"), 1, "Timed out", "exit code 1 without"),
        (plan("terminate"), 1, "got signal: 15", "exit code 1 without"),
        (plan("terminate", "load"), 1, "closing signal SIGTERM", "exit code 1 without"),
        (plan("terminate"), 143, "ended by a signal at step 32", "lost step_000000032.pt"),
        (plan("terminate"), 1, "ended by a signal at step 31", "exit code 1, not 143"),
        (plan("kill"), 1, "SIGKILL\nterminate called after throwing", "has crashed"),
    ],
)
def test_an_output_without_the_cause_is_found(broken, code, text, said):
    for result in (Result("", text, code), Result(text, "", code)):
        with pytest.raises(Wrong, match=said):
            check_output(broken, result, {"step_000000031.pt"}, hit=True)


@pytest.mark.parametrize(
    "text",
    [
        "srun: error: node1: task 0: Aborted",
        "srun: error: node[1-2]: tasks 0-1: Aborted",
        "srun: error: node1: task 0: Illegal instruction",
        "srun: error: node1: task 0: Bus error",
        "process 0 terminated with signal SIGBUS",
        "process 0 terminated with signal SIGILL",
        "free(): invalid pointer",
        "malloc(): corrupted top size",
        "double free or corruption (out)",
    ],
)
def test_a_crash_is_found(text):
    with pytest.raises(Wrong, match="something has crashed"):
        check_no_crash(Result("", text, 1))


@pytest.mark.parametrize(
    "text",
    [
        "srun: error: node1: task 0: Killed",
        "srun: error: node2: task 1: Exited with exit code 1",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "process 0 terminated with signal SIGKILL",
        "traceback : Signal 9 (SIGKILL) received by PID 123",
    ],
)
def test_the_end_of_a_killed_job_is_no_crash(text):
    check_no_crash(Result("", text, 1))


RESTARTED = "failed (exitcode: -9) local_rank: 0\n"
NEWEST = "loaded run/step_000000046.pt: epoch 2, step 46"


@pytest.mark.parametrize(
    ("text", "before"),
    [
        (RESTARTED + NEWEST, {"step_000000023.pt", "step_000000046.pt"}),
        (RESTARTED + NEWEST, {"step_000000023.pt"}),  # the fault had a delay
        (RESTARTED + "no checkpoint in run", set()),
        ("", {"step_000000023.pt"}),  # no restart, as after a pause
    ],
)
def test_a_restart_by_torchrun_may_resume(text, before):
    check_restart(Result("", text, 0), before)


@pytest.mark.parametrize("text", ["", "no checkpoint in run", NEWEST])
def test_a_restart_by_torchrun_from_scratch_is_found(text):
    with pytest.raises(Wrong, match="without loading step_000000069"):
        check_restart(Result("", RESTARTED + text, 0), {"step_000000069.pt"})


@pytest.mark.parametrize(
    ("place", "nth", "steps"),
    [
        ("start-up", 1, []),
        ("load", 1, []),
        ("step", 23, []),
        ("step", 24, [23]),
        ("validation", 1, []),
        ("epoch's end", 3, [23, 46]),
        ("save", 5, [46, 69, 92]),  # the newest three
    ],
)
def test_the_due_checkpoints_follow_from_the_place(place, nth, steps):
    assert place in PLACES
    assert due_checkpoints(plan("kill", place, nth)) == {f"step_{step:09d}.pt" for step in steps}


@contextmanager
def rank_that_lives(seconds, folder):
    script = f"sleep {seconds} & echo $! > rank; mv rank {moment.REACHED}; wait; exec sleep 60"
    with Running("sh", "-c", script, cwd=folder) as running:
        wait_until((folder / moment.REACHED).exists)
        yield running
        running.kill()


@pytest.mark.parametrize(
    ("seconds", "delay", "over", "hit"),
    [(60, 1, False, True), (60, 1, True, False), (2, 3, True, False)],
)
def test_a_fault_hits_only_while_the_training_goes_on(tmp_path, seconds, delay, over, hit):
    if over:
        (tmp_path / LAST).touch()
    with rank_that_lives(seconds, tmp_path) as running:
        assert inject(plan("kill", delay=delay), running, tmp_path, tmp_path) is hit
        wait_until(lambda: len(running.processes()) == 1)  # the shell, which is now a sleep


def test_a_rank_that_is_gone_before_the_training_ends_is_an_error(tmp_path):
    with rank_that_lives(0.3, tmp_path) as running, pytest.raises(psutil.NoSuchProcess):
        inject(plan("kill", delay=3), running, tmp_path, tmp_path)


def test_a_job_may_ignore_a_fault_only_if_it_came_too_late():
    late = plan("kill", delay=0.5)
    check_output(late, Result("", "", 0), set(), hit=False)
    with pytest.raises(Wrong, match="exit code 1 without a clear error"):
        check_output(late, Result("", "", 1), set(), hit=False)


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([-0.0, 1]),
        torch.tensor([0, 1], dtype=torch.float64),
        torch.tensor([0.0, 1]).view(torch.int32),
        torch.tensor([[0.0, 1]]),
        torch.tensor([0.0, 1, 2]),
    ],
    ids=["minus zero", "dtype", "type of the same bits", "shape", "length"],
)
def test_weights_are_compared_bit_for_bit(other):
    weights = {"weight": torch.tensor([0.0, 1]), "count": torch.tensor(2.0)}
    equal = {name: value.clone() for name, value in weights.items()}
    check_equal(equal | {"weight": torch.tensor([0.0, 9, 1])[::2]}, weights, "equal ones")
    with pytest.raises(Wrong, match="others: not equal"):
        check_equal(equal | {"weight": other}, weights, "others")


def test_a_step_that_was_not_taken_is_not_counted(tmp_path, monkeypatch):
    def take_step(self, window):
        if window == "fault":
            raise RuntimeError

    monkeypatch.setattr(TrainLoop, "_train_step", take_step)
    monkeypatch.chdir(tmp_path)
    moment.count_steps()
    TrainLoop._train_step(None, "batch")
    with pytest.raises(RuntimeError):
        TrainLoop._train_step(None, "fault")
    assert moment.STEPS_TAKEN.stat().st_size == 1


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_table_counts_outcomes_and_shows_what_the_rounds_that_passed_have_cost():
    kill, restarted = plan("kill"), plan("kill", launcher="torchrun", restarts=1)
    costs = [Cost(1.0, 4.0, 7), Cost(3.0, 5.0, 0), Cost(2.0, 9.0, 23)]
    rounds = [RoundResult(kill, RESUMED, 9.0, cost=cost) for cost in costs]
    rounds += [
        RoundResult(kill, WRONG, 9.0),
        RoundResult(kill, TOO_LATE, 9.0),
        RoundResult(restarted, STARTED_OVER, 9.0, cost=Cost(9.0, 1.0, 8)),
        RoundResult(plan("pause"), WENT_ON, 9.0, cost=Cost(steps=0)),
    ]
    head, _, *rows = [cells(line) for line in table(rounds).splitlines()]
    outcomes = [WENT_ON, RESUMED, STARTED_OVER, TOO_LATE]
    assert head == ["fault", "rounds", *outcomes, "job ended after", "steps lost"]
    assert rows == [
        ["kill", "6", "0", "3", "1", "1", "2.5 / 9.0 s", "8 / 23"],
        ["pause", "1", "1", "0", "0", "0", "", "0 / 0"],
    ]
    counts = "1 WRONG, 3 resumed, 1 started over, 1 too late, 1 went on"
    assert report.summary(rounds) == f"7 rounds: {counts}"
    assert report.launchers(rounds) == "By launcher: 6 spawn, 1 torchrun --max-restarts=1."


KILLS = ["--launchers", "spawn", "--faults", "kill"]


def save_rounds(file, seed, numbers):
    """Save rounds as if they had been run, each with a cost."""
    version = saved.code_version()
    command = " ".join([".venv/bin/python drill/drill.py --seed", seed, *KILLS])
    for number in numbers:
        own = plan("kill", number=number)
        day, cost = f"2026-11-0{number}", Cost(1.0, 4.0, 10)
        result = RoundResult(own, RESUMED, 9.0, "", cost, command, jobs=2, day=day)
        saved.add(file, result, version)
    return saved.load(file, version)


def test_saved_rounds_add_up_and_are_not_run_again(tmp_path):
    file, page = tmp_path / "rounds.jsonl", tmp_path / "page.md"
    page.write_text("<!-- begin of what the drill has written -->\n<!-- end -->")
    assert len(save_rounds(file, "4", [1, 2])) == 2
    assert len(save_rounds(file, SEED, [1, 2, 3])) == 5
    ended = drill(tmp_path, *KILLS, "--rounds", "3", "--save", file, "--markdown", page)
    assert ended.code == 0, ended.stderr
    assert "\nround " not in ended.stdout and "5 rounds: 5 resumed" in ended.stdout
    text = page.read_text()
    for seed, count in ("4", 2), (SEED, 3):
        line = f".venv/bin/python drill/drill.py --seed {seed} {' '.join(KILLS)} --rounds {count}"
        assert f"`{line} --jobs 2`" in text and f"{line} --jobs 2" in ended.stdout
    assert re.search(r"^on .*, 2026-11-01 to 2026-11-03$", text, re.M)
    row = ["kill", "5", "0", "5", "0", "0", "1.0 / 1.0 s", "10 / 10"]
    assert row in map(cells, text.splitlines())


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (f'"version": "{saved.code_version()}"', '"version": "0123"', "of version 0123, but"),
        ("}", "", "line 1 of rounds.jsonl is not a round: remove it"),
        ('"launcher"', '"starter"', "line 1 of rounds.jsonl is not a round: remove it"),
    ],
    ids=["another version", "cut short", "other fields"],
)
def test_a_file_that_does_not_fit_is_an_error_of_one_line(tmp_path, before, after, said):
    file = tmp_path / "rounds.jsonl"
    save_rounds(file, SEED, [1])
    text = file.read_text()
    file.write_text(text.replace(before, after))
    ended = drill(tmp_path, *KILLS, "--rounds", "1", "--save", file.name)
    assert ended.code == 1 and said in ended.stderr and ended.stderr.count("\n") == 1


CODE = [*saved.FILES, "drill/rounds.py", "src/ddp_ref/handler.py"]


@pytest.mark.parametrize("changed", [*CODE, "torch"])
def test_the_version_covers_all_code_that_decides_a_round(tmp_path, monkeypatch, changed):
    for name in CODE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(saved, "ROOT", tmp_path)
    monkeypatch.setattr(saved.ddp_ref, "__file__", str(tmp_path / "src/ddp_ref/__init__.py"))
    before = saved.code_version()
    assert saved.code_version() == before
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0")
    else:
        (tmp_path / changed).write_text("other")
    assert saved.code_version() != before


def test_a_round_of_code_that_has_changed_meanwhile_is_not_saved(tmp_path):
    with pytest.raises(SystemExit, match="the code has changed since the drill began"):
        saved.add(tmp_path / "rounds.jsonl", RoundResult(plan("kill"), RESUMED, 9.0), "0123")
    assert not (tmp_path / "rounds.jsonl").exists()


@pytest.mark.full
def test_an_interrupt_ends_the_running_rounds(tmp_path):
    flags = ["--launchers", "spawn", "--faults", "stop", "--rounds", "4", "--jobs", "2"]
    command = [sys.executable, DRILL, "--seed", SEED, *flags]
    with Running(*command, cwd=tmp_path, env={"TMPDIR": str(tmp_path)}) as running:

        def reached():
            assert running.process.poll() is None, running.text()
            return list(tmp_path.glob("drill-*/round*/reached"))

        wait_until(reached, timeout=240)
        running.process.send_signal(signal.SIGINT)
        ended = running.wait(20)  # a stopped rank alone would take longer
    assert ended.code == 130 and "interrupted" in ended.stdout
    # A process that the drill has killed may still be exiting when the drill has ended.
    wait_until(lambda: not processes_in(tmp_path), timeout=10)
    assert not list(tmp_path.glob("drill-*"))


def processes_in(folder):
    """Return the live processes whose working directory is below `folder`."""
    processes = psutil.process_iter(["cwd"])
    return [process for process in processes if (process.info["cwd"] or "").startswith(str(folder))]


@pytest.mark.full
def test_rounds_end_right_and_the_table_shows_it(tmp_path):
    """One round damages a checkpoint, one raises an exception; then we read both from the file."""
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- begin of what the drill has written -->\nold\n<!-- end -->\nafter"
    )
    faults = ["--launchers", "spawn", "--faults", "flip", "exception"]
    flags = [*faults, "--rounds", "2", "--jobs", "2", "--save", tmp_path / "rounds.jsonl"]
    ended = drill(tmp_path, *flags, "--markdown", page)
    assert ended.code == 0, ended.stdout + ended.stderr
    rows = [line for line in ended.stdout.splitlines() if line.startswith(("| flip", "| exc"))]
    assert [cells(row)[:4] for row in rows] == [
        ["exception", "1", "0", "1"],
        ["flip", "1", "0", "1"],
    ], ended.stdout
    again = drill(tmp_path, *flags).stdout
    assert "round 1" in ended.stdout and "round 1" not in again and rows[0] in again
    rounds = saved.load(tmp_path / "rounds.jsonl", saved.code_version())
    exception, flip = (result.cost for result in rounds)
    assert exception.steps == 23  # rank 1 raises at the end of an epoch that is not saved yet
    assert flip.steps >= 23  # the damaged checkpoint was of an epoch
    assert all(0 < cost.ended < cost.resumed + 60 for cost in (exception, flip))
    assert set(rows) < set(page.read_text().splitlines())
    assert page.read_text().startswith("before") and page.read_text().endswith("after")
    assert "old" not in page.read_text()


@pytest.mark.full
def test_a_job_that_ends_before_the_fault_is_an_outcome_of_its_own(tmp_path):
    job = Job(SCRIPTS / "train_reference.py", tmp_path)
    job.run_fault_free(["spawn"])
    result = job.run_round(plan("kill", "save", 6, delay=10))
    assert (result.outcome, result.cost) == (TOO_LATE, Cost()), result.detail


LIVES_ON = """
import atexit, time
atexit.register(time.sleep, 8)
"""


@pytest.mark.full
def test_a_rank_that_is_killed_after_its_last_checkpoint_shows_nothing(tmp_path):
    script = tmp_path / "lives_on.py"
    text = (SCRIPTS / "train_reference.py").read_text()
    script.write_text(text.replace("def classifier(", f"{LIVES_ON}\n\ndef classifier("))
    job = Job(script, tmp_path)
    job.run_fault_free(["torchrun"])
    result = job.run_round(plan("kill", "save", 6, delay=3, launcher="torchrun"))
    assert (result.outcome, result.cost) == (TOO_LATE, Cost()), result.detail


FORGETS = "from ddp_ref import Handler\nHandler.load = lambda self, path: None"
FORGETS_IN_A_RESTART = """
import os
from ddp_ref import Handler
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
    Handler.load = lambda self, path: None
"""
SAVES_NO_EPOCH = "from ddp_ref import Checkpoint\nCheckpoint.on_epoch_end = lambda self: None"
IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal = lambda number, handler: None
"""
LEAVES_A_PROCESS = """
import os, subprocess
if {}:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
"""
IN_FIRST_RUN = '"null" not in os.environ["DRILL_MOMENT"] and not os.path.exists("injected")'
IN_SECOND_RUN = 'os.path.exists("injected")'


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "fault", "number", "lines", "said"),
    [
        ("spawn", "exception", 1, FORGETS, "the second run did not log"),
        ("torchrun", "exception", 2, FORGETS_IN_A_RESTART, "restarted by torchrun without loading"),
        ("spawn", "exception", 1, SAVES_NO_EPOCH, "lost step_000000023.pt, step_000000046.pt"),
        # The signal goes to rank 1 while it saves.
        ("spawn", "terminate", 7, IGNORES_SIGTERM, "exit code 0 without a clear error"),
        ("spawn", "exception", 1, LEAVES_A_PROCESS.format(IN_FIRST_RUN), "processes left behind"),
        ("spawn", "exception", 1, LEAVES_A_PROCESS.format(IN_SECOND_RUN), "processes left behind"),
    ],
    ids=[
        "does not resume",
        "does not resume in a restart",
        "saves only at the end",
        "ignores SIGTERM",
        "leaves a process in the first run",
        "leaves a process in the second run",
    ],
)
def test_a_defect_of_the_job_is_found(tmp_path, launcher, fault, number, lines, said):
    script = tmp_path / "broken.py"
    text = (SCRIPTS / "train_reference.py").read_text()
    line = "def classifier("
    assert text.count(line) == 1
    script.write_text(text.replace(line, f"{lines}\n\n\n{line}"))
    flags = ["--launchers", launcher, "--faults", fault, "--script", script]
    ended = drill(tmp_path, *flags, "--only", str(number))
    assert ended.code == 1, ended.stderr
    assert "| WRONG |" in ended.stdout and said in ended.stdout
    again = [".venv/bin/python", "drill/drill.py", "--seed", SEED, *map(str, flags)]
    assert f"WRONG: {' '.join(again)} --only {number}\n" in ended.stdout
