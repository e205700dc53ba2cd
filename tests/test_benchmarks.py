"""The benchmarks: what they compute from given times, and short real measurements."""

import importlib
import re
import sys
import time
from functools import partial

import bench
import gpu
import gpu_report
import growth
import numpy as np
import pytest
import steps
import torch
from finale import CHAR_GPT
from harness import ROOT, SCRIPTS, run
from page import around_marks
from side_by_side import AGAIN, compare, noise, side_by_side
from steps import AT_ONCE, OURS, OWN_LOOPS, RAW, added_time, make_data, make_model, overhead
from tables import Table, markdown, marks, number
from turns import in_launches, steps_of, take_turns

from ddp_ref import initialize_ddp, run_ranks

sys.path.append(str(SCRIPTS))
import doctor

BENCH = ROOT / "benchmarks" / "bench.py"
PAGE = """before
<!-- begin of what bench.py has written: waits -->
old
<!-- end: waits -->
after"""


def test_ratios_compare_times_of_the_same_round():
    """A machine that becomes ten times slower halfway changes no ratio."""
    drawn = np.random.default_rng(0)
    pace = np.repeat([1.0, 10.0], 50)
    base, control, slow = (factor * pace * drawn.normal(1, 0.02, 100) for factor in (1, 1, 1.5))
    times = {"base": list(base), "base" + AGAIN: list(control), "slow": list(slow)}
    first, again, other = rows = compare(times)
    assert first.ratio == first.low == first.high == 1
    assert other.low < 1.5 < other.high and other.high - other.low < 0.05
    assert again.low < 1 < again.high
    assert noise(rows) == max(1 - again.low, again.high - 1) < 0.02


def test_rounds_of_the_same_launch_count_as_one():
    """Two of four launches are 10 % slower. Having more rounds in each adds no information."""
    launches = np.repeat([1.0, 1.1, 1.0, 1.1], 100)
    _, lucky = compare({"base": [1.0] * 400, "lucky": list(launches)}, block=100)
    assert lucky.low == 1 and lucky.high == pytest.approx(1.1)


def test_a_round_times_each_variant_once_in_an_order_that_is_the_same_on_all_ranks():
    def play():
        taken = []
        variants = {name: lambda name=name: taken.append(name) or len(taken) for name in "abcd"}
        return taken, side_by_side(variants, rounds=20, warm_up=2)

    (taken, times), (again, _) = play(), play()
    rounds = [tuple(taken[at : at + 4]) for at in range(0, len(taken), 4)]
    assert len(rounds) == 22 and all(sorted(each) == list("abcd") for each in rounds)
    assert len(set(rounds)) > 5 and taken == again
    assert {len(seconds) for seconds in times.values()} == {20}  # without the warm-up rounds
    assert min(map(min, times.values())) > 8


def test_a_table_shows_times_and_ratios():
    times = {"base": [0.5, 0.5], "base" + AGAIN: [0.5, 0.5], "slow": [1.0, 1.0]}
    text = markdown(Table("a variant", compare(times), ["a goal (missed)"]))
    assert "| slow | 1 s | 2.000 | 2.000 to 2.000 |" in text
    assert "| base | 500 ms | 1.000 | 1.000 to 1.000 |" in text
    assert "- Noise: 0.0%." in text and "- a goal (missed)" in text
    assert [number(ratio) for ratio in (0.5, 12.34, 4321.0)] == ["0.500", "12.3", "4,321"]


@pytest.mark.parametrize(
    "seconds, verdict",
    [
        ([1.015] * 9, "+1.5%, +1.5% to +1.5% (reached)"),
        ([1.03] * 9, "+3.0%, +3.0% to +3.0% (missed)"),
        ([1.0] * 5 + [1.1] * 4, "(too much noise to tell)"),
    ],
)
def test_an_interval_around_the_limit_reaches_no_goal(seconds, verdict):
    assert verdict in overhead({OURS: seconds, RAW: [1.0] * 9}, RAW, limit=0.02)


def test_the_time_that_a_loop_adds():
    times = {OURS: [2.3e-3] * 9, AT_ONCE: [2e-3] * 9, "faster": [1.9e-3] * 9}
    assert added_time(times, AT_ONCE, [OURS]) == "Handler +300 µs (+300 µs to +300 µs)"
    assert added_time(times, AT_ONCE, ["faster"]) == "faster -100 µs (-100 µs to -100 µs)"


def test_each_launch_has_a_seed_of_its_own_and_its_part_of_the_rounds():
    def seeds(name, rounds, seed):
        return {name: [seed] * rounds}

    times, part = in_launches(seeds, "loop", rounds=4, launches=3, nproc=1)
    assert part == 2 and times == {"loop": [0, 0, 1, 1, 2, 2]}


def test_loops_take_turns_of_ten_steps():
    done = []

    def train(name, tick):
        for _ in range(steps_of(2)):
            done.append(name)
            tick()
        done.append("end of " + name)  # a loop ends within its last turn

    times = take_turns({name: partial(train, name) for name in "abc"}, 2, seed=0)
    assert [len(seconds) for seconds in times.values()] == [2, 2, 2]
    ends = [at for at, what in enumerate(done) if what.startswith("end")]
    assert all(done[at - 1] == done[at][-1] for at in ends) and len(ends) == 3
    names = [what for what in done if len(what) == 1]
    turns = [names[at : at + 10] for at in range(0, len(names), 10)]
    assert all(len(set(turn)) == 1 for turn in turns) and len(turns) == 15
    assert all({turns[at + i][0] for i in range(3)} == set("abc") for at in range(0, 15, 3))


def test_a_loop_that_fails_ends_all_turns():
    def good(tick):
        for _ in range(steps_of(1)):
            tick()

    def bad(tick):
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        take_turns({"good": good, "bad": bad, "better": good}, 1, seed=0)
    with pytest.raises(AssertionError, match="short has trained for 0 steps"):
        take_turns({"good": good, "short": lambda tick: None}, 1, seed=0)


def test_loops_that_train_other_weights_are_refused():
    """The loops of both ranks end with equal weights; then one loop changes the last bit."""

    def one_bit_off(model, *args):
        OWN_LOOPS[OURS](model, *args)
        weight = next(model.parameters()).data.view(-1)[:1]
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))

    def train(loops):
        initialize_ddp()
        data = make_data(steps_of(1), ranks=2)
        return steps.time_loops(loops, partial(make_model, 8), data, rounds=1, seed=0, check=True)

    times, _ = run_ranks(train, OWN_LOOPS)
    assert list(times) == list(OWN_LOOPS)
    with pytest.raises(AssertionError, match="off trained another model"):
        run_ranks(train, {RAW: OWN_LOOPS[RAW], "off": one_bit_off})


def test_the_gpt_of_gpt2s_size_has_124_million_parameters_or_less_if_the_memory_is_small():
    sizes = [gpu.size_for(gib * 2**30) for gib in (139, 39, 23, 8)]
    assert [size.batch for size in sizes] == [32, 16, 8, 4] and sizes[3] == gpu.TINY
    _, length, vocabulary, *sizes = sizes[0]
    with torch.device("meta"):
        model = CHAR_GPT.GPT("x" * vocabulary, *sizes, length)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_354_560


def test_the_page_has_a_place_for_each_benchmark():
    page = ROOT / "docs" / "benchmarks.md"
    begins = re.escape(marks("NAME")[0]).replace("NAME", r"(\w+)")
    assert tuple(re.findall(begins, page.read_text())) == bench.NAMES
    for name in bench.NAMES:
        before, after = around_marks(page, *marks(name))
        benchmark = importlib.import_module(name)
        written = page.read_text()[len(before) : -len(after)]
        if "Not measured yet" not in written:
            assert benchmark.__doc__.strip() in written
            assert f"`bench.py {name} --rounds={benchmark.ROUNDS}` on " in written


def test_a_benchmark_is_measured_and_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    ended = run(sys.executable, BENCH, "waits", "--rounds=2", "--markdown", page, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    (row,) = [line for line in ended.stdout.splitlines() if line.startswith("| on_rank(0) |")]
    text = page.read_text()
    assert row in text and "old" not in text and "\n\n`bench.py waits --rounds=2` on " in text
    assert text.startswith("before\n") and text.endswith("\nafter")


@pytest.mark.full
def test_benchmarks_that_need_no_peer_run_and_their_weights_agree(tmp_path):
    ended = run(sys.executable, BENCH, "saves", "finale", "--rounds=1", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count(" median | ratio to ") == 2


@pytest.mark.full
def test_growth_is_measured_and_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\n".join(growth.MARKS) + "\nafter")
    script = BENCH.parent / "growth.py"
    ended = run(sys.executable, script, "--ranks", "2", "3", "--markdown", page, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == 12 and not any("" in row for row in rows)
    (sockets,) = [row for row in rows if row[0] == growth.SOCKETS]
    assert sockets[1:3] == ["8", "11"]  # 3 N + 2


def test_the_growth_table_for_known_costs():
    """The costs of the last two worlds decide the exponent."""
    costs = {2: 0.5, 10: 0.01, 100: 0.1}
    names = growth.OPEN, growth.LAZY
    lines = growth.table({n: dict.fromkeys(names, cost) for n, cost in costs.items()}).splitlines()
    assert f"| {growth.LAZY} | 500 ms | 10 ms | 100 ms | 1.0 | 1 s |" in lines
    assert f"| {growth.OPEN} | 500 ms | 10 ms | 100 ms | 1.0 | 10 s |" in lines


def test_the_parts_of_the_report_have_enough_time_and_end_within_10_minutes():
    parts = gpu_report.parts(100)
    assert sum(part.timeout + gpu_report.ENDING for part in parts) < 600
    assert parts[0].title == "Doctor" and parts[0].timeout > 2 * doctor.LIMIT.total_seconds()


STUCK = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("started", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], start_new_session=True)
time.sleep(60)
"""


def test_a_part_of_the_report_that_is_stuck_is_killed(monkeypatch):
    """The report does not wait for a rank that outlives the part and keeps its output open."""
    monkeypatch.setattr(gpu_report, "ENDING", 1)
    start = time.monotonic()
    text, code = gpu_report.run(gpu_report.Part("Stuck", "", 3, ["-c", STUCK]))
    assert time.monotonic() - start < 15
    assert code == 1 and "failed: not finished after 3 s.\n\n    started" in text


def test_a_part_that_needs_a_missing_package_is_skipped():
    part = gpu_report.Part("Tests", "numpy no_such_package", 3, [])
    assert gpu_report.run(part) == ("Skipped: this Python has no no_such_package.", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_without_a_gpu_there_is_nothing_to_measure(tmp_path):
    ended = run(sys.executable, BENCH, "gpu", "--rounds=1", cwd=tmp_path)
    assert ended.code == 0 and "left out: no CUDA device is visible" in ended.stdout
    ended = run(sys.executable, BENCH.parent / "gpu_report.py", cwd=tmp_path)
    assert ended.code == 2 and "no CUDA device is visible" in ended.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (["speed"], "there is no benchmark speed: choose from steps, gathers"),
        (["steps", "--markdown=page.md"], "page.md lacks the lines <!-- begin of what"),
        (["waits", "--markdown=none.md"], "No such file or directory: 'none.md'"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_measured(tmp_path, flags, message):
    (tmp_path / "page.md").write_text(PAGE)
    ended = run(sys.executable, BENCH, *flags, cwd=tmp_path)
    assert ended.code == 2 and message in ended.stderr.splitlines()[-1]
