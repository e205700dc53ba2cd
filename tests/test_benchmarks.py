"""The benchmarks: what they compute from given times, and short real measurements."""

import ast
import importlib
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from threading import Thread

import bench
import gpt2_124m
import gpu
import gpu_report
import growth
import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import ROOT, run
from page import around_marks
from side_by_side import AGAIN, compare, side_by_side, spread
from steps import (
    ACCELERATE,
    AT_ONCE,
    FABRIC,
    FABRIC_AT_ONCE,
    IGNITE,
    OURS,
    RAW,
    TRAINER,
    against_raw,
    make_data,
    make_model,
    time_loops,
    times_on_rank,
    with_same_loader,
)
from tables import Table, markdown, marks, number, write_section
from turns import in_launches, steps_of, take_turns

from ddp_ref import run_ranks
from ddp_ref.extras import doctor

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
    first, again, other = rows = compare(times, "base")
    assert first.ratio == first.low == first.high == 1
    assert other.low < 1.5 < other.high and other.high - other.low < 0.05
    assert again.low < 1 < again.high
    assert spread(rows) == max(1 - again.low, again.high - 1) < 0.02


def test_rounds_of_the_same_launch_count_as_one():
    """Two of four launches are 10 % slower. Having more rounds in each adds no information."""
    launches = np.repeat([1.0, 1.1, 1.0, 1.1], 100)
    times = {"base": [1.0] * 400, "base" + AGAIN: [1.0] * 400, "lucky": list(launches)}
    assert compare(times, "base", block=100)[2].high == pytest.approx(1.1)
    assert compare(times, "base", block=100)[2].low == 1


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
    text = markdown(Table("a variant", compare(times, "base"), ["a goal (missed)"]))
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
    assert verdict in against_raw(compare({RAW: [1.0] * 9, OURS: seconds}, RAW))


def test_loops_with_the_same_loader_are_compared_with_each_other():
    times = {AT_ONCE: [2e-3] * 9, OURS: [2.1e-3] * 9, FABRIC_AT_ONCE: [2.2e-3] * 9}
    limit, added = with_same_loader(times, 3, limit=0.02)
    assert "Measured: +5.0%, +5.0% to +5.0% (missed)" in limit
    assert "Handler +100 µs (+100 µs to +100 µs)" in added and "+200 µs" in added


def test_each_launch_has_a_seed_of_its_own_and_its_part_of_the_rounds():
    times, part = in_launches(seeds_on_rank, "loop", rounds=4, launches=3, nproc=1)
    assert part == 2 and times == {"loop": [0, 0, 1, 1, 2, 2]}
    times, part = in_launches(seeds_on_rank, "loop", rounds=1, launches=3, nproc=1)
    assert part == 1 and times == {"loop": [0]}


def seeds_on_rank(name, rounds, seed):
    return {name: [seed] * rounds}


def test_loops_take_turns_of_ten_steps():
    done = []

    def loop(name):
        def train(tick):
            for _ in range(steps_of(2)):
                done.append(name)
                tick()
            done.append("end of " + name)  # a loop ends within its last turn

        return train

    times = take_turns({name: loop(name) for name in "abc"}, 2, seed=0)
    assert [len(seconds) for seconds in times.values()] == [2, 2, 2]
    ends = [at for at, what in enumerate(done) if what.startswith("end")]
    assert all(done[at - 1] == done[at][-1] for at in ends) and len(ends) == 3
    steps = [what for what in done if len(what) == 1]
    turns = [steps[at : at + 10] for at in range(0, len(steps), 10)]
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


def test_one_rank_trains_each_loop_for_the_same_number_of_steps():
    """The GPU benchmark also starts a single rank, with nccl."""
    names = (RAW, RAW + AGAIN, OURS)
    (times,) = run_ranks(times_on_rank, 8, 1, names, nproc=1)
    assert set(times) == set(names)


def test_a_loop_that_trains_without_ddp_is_refused():
    """It would be faster than the others for that reason alone."""

    def without_ddp(model, data, tick):
        model(data[:1][0])
        tick()

    with pytest.raises(AssertionError, match="a peer trains without DDP"):
        time_loops({"a peer": without_ddp}, lambda: make_model(8), make_data(1, 1), 1, 0, False)


@pytest.mark.parametrize(
    "ranks, missing, absent",
    [
        (1, [], {ACCELERATE, IGNITE}),
        (2, [], set()),
        (2, ["lightning"], {FABRIC, FABRIC_AT_ONCE, TRAINER}),
        (1, ["accelerate", "ignite"], {ACCELERATE, IGNITE}),
    ],
)
def test_on_gpus_a_peer_is_left_out_if_it_is_missing_or_would_not_use_ddp(
    monkeypatch, ranks, missing, absent
):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name in missing else name)
    reasons = gpu.left_out(ranks)
    assert set(reasons) == absent
    for name, reason in reasons.items():
        is_missing = gpu.PACKAGES[name] in missing
        assert ("is not installed" if is_missing else "does not wrap") in reason


@pytest.mark.parametrize("ours, verdict", [(2.1e-3, "reached"), (2.3e-3, "missed")])
def test_the_time_that_handler_adds_to_a_small_step_on_a_gpu(ours, verdict):
    note = gpu.added({RAW: [3e-3] * 9, AT_ONCE: [2e-3] * 9, OURS: [ours] * 9})
    assert "at most 200 µs to 'raw DDP, batches looked up at once'" in note
    assert f"+{(ours - 2e-3) * 1e6:.0f} µs (" in note and f"({verdict})" in note


def test_the_characters_that_each_loop_trains_on_in_a_second():
    """On an H200, the raw loop's step took 7.57 ms."""
    rows = compare({RAW: [7.57e-3] * 9, OURS: [15.14e-3] * 9}, RAW)
    raw, ours = gpu.speeds(rows, ranks=1)
    assert raw == f"{RAW}: 541,100 characters a second"
    assert ours == f"{OURS}: 270,500 characters a second"


def test_gpt2_has_124_million_parameters_and_known_operations():
    """On an H200, 81.2 ms for a step were 403,500 tokens a second and 32.5 % of the peak."""
    with torch.device("meta"):
        model = gpt2_124m.GPT(gpt2_124m.GPT2)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_475_904
    assert gpt2_124m.GPT2.flops / gpt2_124m.GPT2.tokens == pytest.approx(798e6, rel=1e-3)
    rows = compare({gpt2_124m.BY_HAND: [81.2e-3] * 9}, gpt2_124m.BY_HAND)
    (line,) = gpt2_124m.speeds(rows, gpt2_124m.GPT2, gpt2_124m.PEAKS["NVIDIA H200"])
    assert line == "by hand: 403,500 tokens a second, 32.5% of 989.4 TFLOP/s"
    (line,) = gpt2_124m.speeds(rows, gpt2_124m.GPT2, None)
    assert line == "by hand: 403,500 tokens a second"


def test_gpt2_is_made_smaller_if_the_memory_is():
    sizes = [gpt2_124m.size_for(gib * 2**30) for gib in (139, 39, 23, 8)]
    assert [size.batch for size in sizes[:3]] == [32, 16, 8]
    assert sizes[0] == gpt2_124m.GPT2 and sizes[3] == gpt2_124m.TINY


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


def test_the_long_tables_have_a_figure(tmp_path):
    times = {RAW: [1.0, 1.0], RAW + AGAIN: [1.0, 1.1], OURS: [2.0, 2.0]}
    page = tmp_path / "page.md"
    page.write_text("".join(marks("steps")))
    write_section(page, "steps", "about", [Table("a step", compare(times, RAW), [])], rounds=2)
    assert page.read_text().count("](figures/benchmark-steps.svg)") == 1
    assert "<svg" in (tmp_path / "figures" / "benchmark-steps.svg").read_text()


@pytest.mark.full
def test_growth_is_measured_and_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\n".join(growth.MARKS) + "\nafter")
    script = BENCH.parent / "growth.py"
    ended = run(sys.executable, script, "--ranks", "2", "3", "--markdown", page, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text().splitlines()
        if line.startswith("| ")
    ]
    names = ["CPU time of the busiest rank", "---", *growth.NAMES, "sockets"]
    assert [row[0] for row in rows] == names and not any("" in row for row in rows)
    assert rows[-1][1:3] == ["6", "8"]  # as predicted


def test_the_growth_table_for_known_costs():
    """The costs of the last two worlds decide the exponent."""
    costs = {2: 0.5, 10: 0.01, 100: 0.1}
    worlds = [
        growth.Costs(n, dict.fromkeys(growth.NAMES, cost), 2 * n) for n, cost in costs.items()
    ]
    lines = growth.table(worlds).splitlines()
    cells = "500 ms | 10 ms | 100 ms | 1.0"
    assert f"| {growth.ON_RANK} | {cells} | 1 s |" in lines
    assert f"| {growth.LAZY} | {cells} | 1 s |" in lines
    assert f"| {growth.OPEN} | {cells} | 10 s |" in lines
    assert "| sockets | 4 | 20 | 200 | 1.0 | 2,002 |" in lines


def test_wrong_arguments_of_growth_are_refused_before_anything_is_measured(tmp_path):
    page = tmp_path / "page.md"
    page.touch()
    for flags, problem in (
        (["--ranks", "2", "2"], "must be ascending"),
        (["--ranks", "1", "2"], "from 2 on"),
        (["--markdown", page], "lacks the lines"),
    ):
        ended = run(sys.executable, BENCH.parent / "growth.py", *flags, cwd=tmp_path)
        assert ended.code == 2 and problem in ended.stderr


def test_with_gloo_every_rank_looks_up_the_address_of_every_rank():
    """So growth.py predicts that the work grows with the square of the number of ranks."""
    ranks, store = 6, RecordingStore()
    timeout = timedelta(seconds=60)
    groups = []  # keeps them: if one went away, the others that still connect to it would fail

    def open_group(rank):
        groups.append(dist.ProcessGroupGloo(store, rank, ranks, timeout))

    threads = [Thread(target=open_group, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.asked) == ranks**2


class RecordingStore(dist.Store):
    """The store methods that gloo calls. It records the keys looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.store = dist.HashStore()
        self.asked: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.store.wait(keys, timeout)

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        return self.store.get(key)


@pytest.mark.full
@pytest.mark.parametrize("name", ["saves", "scaling", "finale"])
def test_a_benchmark_that_needs_no_peer_runs_and_its_weights_agree(tmp_path, name):
    ended = run(sys.executable, BENCH, name, "--rounds=1", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert " median | " in ended.stdout and "ratio to " in ended.stdout


def test_the_report_checks_for_the_packages_that_its_parts_import():
    """Imports inside functions count, too.

    steps.py and tables.py are left out, because they import the peers and matplotlib in functions.
    """
    imported = set()
    for name in ("bench", "gpu", "gpt2_124m", "finale", "side_by_side", "turns", "page"):
        for node in ast.walk(ast.parse((BENCH.parent / f"{name}.py").read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or node.names[0].name]
                imported |= {name.split(".")[0] for name in names}
    ours = {path.stem for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]} | {"torch", "ddp_ref"}
    packages = imported - sys.stdlib_module_names - ours
    parts = {part.title: part for part in gpu_report.parts(2, 1)}
    for part in ("Speed", "GPT-2"):
        assert {"numpy", "scipy"} <= packages <= set(parts[part].needs)
    page = (ROOT / "docs" / "gpu.md").read_text()
    for name in {name for part in parts.values() for name in part.needs}:
        assert f"`{ {'sklearn': 'scikit-learn', 'yaml': 'pyyaml'}.get(name, name) }`" in page


def test_the_parts_of_the_report_have_enough_time_and_end_within_10_minutes():
    parts = gpu_report.parts(8, 100)
    assert sum(part.timeout + gpu_report.ENDING for part in parts) < 600
    assert parts[0].title == "Doctor" and parts[0].timeout > 2 * doctor.LIMIT.total_seconds()


STUCK = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("in", os.getcwd(), flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], start_new_session=True)
time.sleep(60)
"""


def test_a_part_of_the_report_that_is_stuck_is_killed(monkeypatch):
    """The report does not wait for a rank that outlives the part and keeps its output open."""
    monkeypatch.setattr(gpu_report, "ENDING", 1)
    start = time.monotonic()
    text, code = gpu_report.run(gpu_report.Part("Stuck", (), 3, ["-c", STUCK]))
    assert time.monotonic() - start < 15
    assert code == 1 and "failed: not finished after 3 s" in text
    assert "in /" in text and f"in {Path.cwd()}" not in text  # parts write files


@pytest.fixture
def report(monkeypatch, tmp_path):
    """Return a function that runs the report with fake parts and returns its exit code."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpu_report, "machine", lambda gpus: f"{gpus} GPUs")

    def report(run, page):
        monkeypatch.setattr(gpu_report, "run", run)
        monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--page", str(page)])
        return gpu_report.main()

    return report


def test_the_report_is_written_after_each_part(report, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(" old ".join(["before " + gpu_report.MARKS[0], gpu_report.MARKS[1] + " after"]))

    def run_one(part):
        if part.title != "Doctor":
            raise KeyboardInterrupt
        return "the machine is healthy", 0

    with pytest.raises(KeyboardInterrupt):
        report(run_one, page)
    text = page.read_text()
    assert "2 GPUs\n\n### Doctor\n\nthe machine is healthy" in text and "old" not in text
    assert text.startswith("before <!--") and text.endswith("--> after")


def test_a_page_that_cannot_be_written_is_refused_before_the_first_part(
    report, tmp_path, monkeypatch, capsys
):
    page = tmp_path / "page.md"
    page.write_text("".join(gpu_report.MARKS))
    open_file = Path.open

    def read_only(path, mode="r", *args, **options):
        if path == page and mode != "r":
            raise OSError(30, "Read-only file system", str(path))
        return open_file(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(SystemExit):
        report(lambda part: pytest.fail("a part was run"), page)
    assert "cannot write the results into " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_without_a_gpu_there_is_nothing_to_measure(tmp_path):
    ended = run(sys.executable, BENCH, "gpu", "gpt2_124m", "--rounds=1", cwd=tmp_path)
    assert ended.code == 0 and ended.stdout.count("left out: no CUDA device is visible") == 2
    ended = run(sys.executable, BENCH.parent / "gpu_report.py", cwd=tmp_path)
    assert ended.code == 2 and "no CUDA device is visible" in ended.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (["speed"], "there is no benchmark speed: choose from steps, workers"),
        (["waits", "--rounds=0"], "--rounds must be at least 1, not 0"),
        (["steps", "--markdown=page.md"], "page.md lacks the lines <!-- begin of what"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_measured(tmp_path, flags, message):
    (tmp_path / "page.md").write_text(PAGE)
    ended = run(sys.executable, BENCH, *flags, cwd=tmp_path)
    assert ended.code == 2 and message in ended.stderr.splitlines()[-1]
