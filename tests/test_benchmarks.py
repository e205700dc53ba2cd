"""The benchmarks: what they compute from given times, and short real measurements."""

import importlib
import re
import sys

import bench
import growth
import numpy as np
import pytest
from harness import ROOT, run
from page import around_marks
from side_by_side import AGAIN, compare, noise
from tables import marks

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


def test_the_page_has_a_place_for_each_benchmark():
    page = ROOT / "docs" / "benchmarks.md"
    begins = re.escape(marks("NAME")[0]).replace("NAME", r"(\w+)")
    assert tuple(re.findall(begins, page.read_text())) == bench.NAMES
    for name in bench.NAMES:
        before, after = around_marks(page, *marks(name))
        benchmark = importlib.import_module(name)
        written = page.read_text()[len(before) : -len(after)]
        assert benchmark.__doc__.strip() in written
        assert f"`bench.py {name} --rounds={benchmark.ROUNDS}` on " in written


@pytest.mark.full
def test_a_benchmark_is_measured_and_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    ended = run(sys.executable, BENCH, "waits", "--rounds=2", "--markdown", page, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    (row,) = [line for line in ended.stdout.splitlines() if line.startswith("| on_rank(0) |")]
    text = page.read_text()
    assert row in text and "old" not in text and "\n\n`bench.py waits --rounds=2` on " in text
    assert text.startswith("before\n") and text.endswith("\nafter")


def test_a_page_without_a_place_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    ended = run(sys.executable, BENCH, "steps", "--markdown=page.md", cwd=tmp_path)
    assert ended.code == 2
    assert "page.md lacks the lines <!-- begin of what" in ended.stderr.splitlines()[-1]


@pytest.mark.full
def test_benchmarks_that_need_no_peer_run_and_their_weights_agree(tmp_path):
    ended = run(sys.executable, BENCH, "saves", "finale", "--rounds=1", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count(" median | ratio to ") == 2


@pytest.mark.full
def test_growth_is_measured(tmp_path):
    script = BENCH.parent / "growth.py"
    ended = run(sys.executable, script, "--ranks", "2", "3", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == 12 and not any("" in row for row in rows)
    (sockets,) = [row for row in rows if row[0] == growth.SOCKETS]
    assert sockets[1:3] == ["8", "11"]  # 3 N + 2
