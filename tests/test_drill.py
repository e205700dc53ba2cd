"""The drill draws the same rounds from a seed, ends them right, and can see one that is wrong."""

import re
import signal
import sys

import psutil
import pytest
import saved
from harness import ROOT, SCRIPTS, Result, Running, run, wait_until
from judge import Wrong, check_clear, check_kept
from plan import Plan
from report import costs, table
from rounds import RESUMED, STARTED_OVER, WRONG, Cost, Played

DRILL = ROOT / "drill" / "drill.py"
SEED = "5"


def drill(folder, *flags, **env):
    return run(sys.executable, DRILL, "--seed", SEED, *flags, cwd=folder, timeout=540, env=env)


def test_the_page_begins_with_what_the_table_says():
    page = (ROOT / "docs" / "fault-drill.md").read_text()
    headline = page.split("\n\n")[1]
    written = re.search(
        r"^(\d+) rounds: (\d+) resumed, (\d+) started over, (\d+) went on", page, re.M
    )
    assert written and re.findall(r"\d+", headline) == [written[n] for n in (1, 4, 2, 3)]


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
    assert reason.startswith("left out: srun: it needs the cluster of make slurm-up")
    assert len(rounds) == 30
    assert not any("srun" in line for line in rounds)
    numbers = [int(line.split()[1]) for line in rounds]
    missing = min(set(range(1, 31)) - set(numbers))
    alone = drill(tmp_path, *faults, "--only", str(missing), **nowhere)
    assert alone.code == 1 and f"error: round {missing} is left out here: srun |" in alone.stderr


def plan(fault, place="step", nth=30, **options):
    chosen = {"number": 1, "launcher": "spawn", "restarts": 0, "rank": 0, "to_all": False}
    return Plan(fault=fault, place=place, nth=nth, **chosen | {"delay": 0, "share": 0.5} | options)


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ("123", "123", ""),
        ("123", "234", ""),  # a newer one has taken the place of the oldest
        ("12", "123", ""),
        ("123", "12", "3"),
        ("123", "13", "2"),
        ("123", "34", "2"),
        ("1", "", "1"),
    ],
)
def test_a_checkpoint_that_is_lost_is_found(before, after, lost):
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
        (plan("kill", delay=0.5), 0, ""),  # the rank may have left before
        (plan("full disk", "save", 6), 0, ""),  # it was the last
        (plan("terminate"), 143, "ended by a signal at step 31"),
        (plan("terminate", launcher="torchrun"), 1, "ended by a signal at step 31"),
        # It was started again, has gone on, and newer checkpoints have taken the place.
        (plan("terminate", launcher="torchrun", restarts=1), 0, "ended by a signal at step 30"),
    ],
)
def test_a_clear_end_is_seen(broken, code, text):
    check_clear(broken, Result("", text, code), {f"step_00000003{n}.pt" for n in (1, 2, 3)})


@pytest.mark.parametrize(
    ("broken", "code", "text", "said"),
    [
        (plan("kill"), -9, "Connection closed by peer", "exit code -9 without a clear error"),
        (plan("kill", launcher="torchrun"), 1, "failed (exitcode: -15) local_rank: 1", "without"),
        (plan("exception"), 0, "", "exit code 0 without"),
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
def test_an_end_that_is_not_clear_is_found(broken, code, text, said):
    for result in (Result("", text, code), Result(text, "", code)):
        with pytest.raises(Wrong, match=said):
            check_clear(broken, result, {"step_000000031.pt"})


def test_the_table_counts_the_outcomes_of_each_pair():
    kill, all_of = plan("kill"), plan("interrupt", to_all=True)
    restarted = plan("kill", launcher="torchrun", restarts=1)
    outcomes = [(kill, RESUMED), (kill, RESUMED), (kill, STARTED_OVER), (restarted, "went on")]
    rounds = [Played(plan, outcome, 1.0) for plan, outcome in [(all_of, RESUMED), *outcomes]]
    head, _, *rows = [line.split("|")[1:-1] for line in table(rounds).splitlines()]
    assert [cell.strip() for cell in head] == [
        "fault",
        "rank",
        "spawn",
        "torchrun --max-restarts=1",
    ]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["kill", "0", "2 resumed, 1 started over", "1 went on"],
        ["interrupt", "all", "1 resumed", ""],
    ]


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_costs_are_medians_and_maxima_of_the_rounds_that_are_right():
    kills = [Cost(1.0, 4.0, 7), Cost(3.0, 5.0, 0), Cost(2.0, 9.0, 23)]
    rounds = [Played(plan("kill"), RESUMED, 9.0, cost=cost) for cost in kills]
    pause = Played(plan("pause"), "went on", 9.0, cost=Cost(steps=0))
    rounds += [Played(plan("kill"), WRONG, 9.0), pause]
    head, _, *rows = [cells(line) for line in costs(rounds).splitlines()]
    assert head == ["fault", "rounds", "job ended after", "training resumed after", "steps lost"]
    assert rows == [
        ["kill", "3", "2.0 / 3.0 s", "5.0 / 9.0 s", "7 / 23"],
        ["pause", "1", "", "", "0 / 0"],
    ]


KILLS = ["--launchers", "spawn", "--faults", "kill"]


def save_rounds(file, seed, numbers):
    """Save rounds as if they had been played, with a cost for each."""
    command = " ".join([".venv/bin/python drill/drill.py --seed", seed, *KILLS])
    for number in numbers:
        cost = Cost(1.0, 4.0, 10)
        played = Played(plan("kill", number=number), RESUMED, 9.0, cost=cost, command=command)
        saved.add(file, played)
    return saved.load(file)


def test_sittings_add_up_and_a_saved_round_is_not_played_again(tmp_path):
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
        assert f"`{line}`" in text and line in ended.stdout
    assert ["kill", "5", "1.0 / 1.0 s", "4.0 / 4.0 s", "10 / 10"] in map(cells, text.splitlines())


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (f'"package": "{saved.package_hash()}"', '"package": "0123"', "of the package 0123, but"),
        ("}", "", "line 1 of rounds.jsonl is not a round: remove it"),
        ('"launcher"', '"starter"', "line 1 of rounds.jsonl is not a round: remove it"),
    ],
    ids=["another version", "cut short", "other fields"],
)
def test_a_file_to_which_nothing_can_be_added_is_one_line(tmp_path, before, after, said):
    file = tmp_path / "rounds.jsonl"
    save_rounds(file, SEED, [1])
    text = file.read_text()
    file.write_text(text.replace(before, after))
    ended = drill(tmp_path, *KILLS, "--rounds", "1", "--save", file.name)
    assert ended.code == 1 and said in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.full
def test_an_interrupt_ends_the_rounds_that_are_played(tmp_path):
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
    found = psutil.process_iter(["cwd"])
    return [process for process in found if (process.info["cwd"] or "").startswith(str(folder))]


@pytest.mark.full
def test_rounds_end_right_and_the_table_tells(tmp_path):
    """A checkpoint that is damaged after a kill, and an exception; then all of it from the file."""
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- begin of what the drill has written -->\nold\n<!-- end -->\nafter"
    )
    faults = ["--launchers", "spawn", "--faults", "flip", "exception"]
    flags = [*faults, "--rounds", "2", "--jobs", "2", "--save", tmp_path / "rounds.jsonl"]
    ended = drill(tmp_path, *flags, "--markdown", page)
    assert ended.code == 0, ended.stdout + ended.stderr
    rows = [line for line in ended.stdout.splitlines() if line.startswith(("| flip", "| exc"))]
    assert len(rows) == 4 and all("1 resumed" in row for row in rows[:2]), ended.stdout
    again = drill(tmp_path, *flags).stdout
    assert "round 1" in ended.stdout and "round 1" not in again and rows[0] in again
    exception, flip = (played.cost for played in saved.load(tmp_path / "rounds.jsonl"))
    assert exception.steps == 23  # rank 1 raises at the end of an epoch that is not saved yet
    assert flip.steps >= 23  # the damaged checkpoint was of an epoch
    assert all(0 < cost.ended < cost.resumed + 60 for cost in (exception, flip))
    assert set(rows) < set(page.read_text().splitlines())
    assert page.read_text().startswith("before") and page.read_text().endswith("after")
    assert "old" not in page.read_text()


FORGETS = "from ddp_ref import Handler\nHandler.load = lambda self, path: None"
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal = lambda number, handler: None
"""
LEAVES = """
import os, subprocess
if os.path.exists("struck"):  # when it is started again
    subprocess.Popen(["sleep", "600"], start_new_session=True)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "number", "lines", "said"),
    [
        ("exception", 1, FORGETS, "it was to begin with"),
        ("terminate", 7, DEAF, "exit code 0 without a clear error"),  # to rank 1, as it saves
        ("exception", 1, LEAVES, "processes left behind: ["),
    ],
    ids=["does not resume", "is deaf", "leaves a process"],
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
