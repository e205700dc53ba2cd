"""on_rank with faults: a rank dies, is slow or is interrupted, while it works or waits."""

import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness import Running, free_port, wait_until

SCRIPT = Path(__file__).with_name("fault_ranks.py")
WORLD = 3


@contextmanager
def ranks(folder: Path, *arguments: object, world: int = WORLD) -> Iterator[list[Running]]:
    """Start the ranks without a launcher: torchrun would end all of them as soon as one ends."""
    common = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ExitStack() as stack:
        started = []
        for rank in range(world):
            env = {k: str(v) for k, v in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            command = [sys.executable, SCRIPT, *map(str, arguments)]
            started.append(stack.enter_context(Running(*command, cwd=folder, env=env)))
        yield started


def reports(rank: Running) -> list[str]:
    """Return what the rank has reported so far."""
    return re.findall("^report: (.*)\n", rank.text(), re.MULTILINE)


def test_ctrl_c_ends_all_ranks_cleanly(tmp_path):
    """Rank 0, which hosts the store, waits for rank 1, as rank 2 does."""
    with ranks(tmp_path, "interrupted") as started:
        for number, rank in enumerate(started):
            rank.wait_for("works" if number == 1 else "waits")
        time.sleep(0.5)
        for rank in started:
            rank.process.send_signal(signal.SIGINT)
        results = [rank.wait(20) for rank in started]
    assert [result.code for result in results] == [-signal.SIGINT] * WORLD, results
    assert not any("terminate called" in result.stderr for result in results)


def test_ctrl_c_on_all_ranks_that_is_caught_leaves_no_rank_waiting(tmp_path):
    """The ranks that waited have left, so rank 0 gives up telling them what it has raised."""
    with ranks(tmp_path, "leaves_for_another_call") as started:
        for number, rank in enumerate(started):
            rank.wait_for("waits" if number else "works")
        time.sleep(0.5)
        for rank in started:
            rank.process.send_signal(signal.SIGINT)
        assert [rank.wait(25).code for rank in started] == [0] * WORLD
        for rank in started:
            first, *others = reports(rank)
            assert first.startswith("KeyboardInterrupt")
            assert others == ["{'ranks': 3.0}", "'usable'"]


def test_ctrl_c_on_one_waiting_rank_ends_its_wait_at_once_and_the_next_call_everywhere(tmp_path):
    """The next call fails, because the others ended the first one without that rank."""
    with ranks(tmp_path, "leaves") as started:
        started[1].wait_for("waits")
        started[0].wait_for("works")
        time.sleep(0.5)
        started[1].process.send_signal(signal.SIGINT)
        wait_until(lambda: reports(started[1]), 3)
        assert not reports(started[0])
        wait_until(lambda: all(len(reports(rank)) == 2 for rank in started), 20)
        first, second = zip(*map(reports, started), strict=True)
    assert "KeyboardInterrupt" in first[1] and "Error" not in first[0] + first[2]
    assert all(report.startswith("RuntimeError") for report in second)


def test_work_may_be_longer_than_the_timeout(tmp_path):
    with ranks(tmp_path, "slow") as started:
        assert [rank.wait().code for rank in started] == [0] * WORLD
        assert [reports(rank) for rank in started] == [["'done'", f"usable by {WORLD}"]] * WORLD


@pytest.mark.parametrize("killed", [0, 3], ids=["the rank with the store", "another rank"])
def test_a_dead_rank_is_noticed_by_all_others_within_5_s(killed, tmp_path):
    """Nobody ends the others, and they catch the exception and keep it. Eight ranks."""
    with ranks(tmp_path, "dies", killed, world=8) as started:
        started[killed].wait_for("dies now")
        died = time.monotonic()
        others = [rank for number, rank in enumerate(started) if number != killed]
        wait_until(lambda: all(reports(rank) for rank in others), 30)
        assert time.monotonic() - died < 5
        for rank in others:
            (report,) = reports(rank)
            assert report.startswith("RuntimeError") and "another rank has died or left" in report


def test_a_dead_rank_is_noticed_by_those_that_wait_while_rank_0_still_works(tmp_path):
    with ranks(tmp_path, "dies_while_rank_0_works", world=8) as started:
        started[3].wait()
        died = time.monotonic()
        waiting = [rank for number, rank in enumerate(started) if number not in (0, 3)]
        wait_until(lambda: all(reports(rank) for rank in waiting), 30)
        assert time.monotonic() - died < 5
        assert not reports(started[0])


def test_a_rank_that_dies_before_it_has_the_result_is_noticed_within_the_timeout(tmp_path):
    with ranks(tmp_path, "dies_receiving", world=8) as started:
        others = [rank for number, rank in enumerate(started) if number != 3]
        # the rank whose result it is may have sent all of it
        wait_until(lambda: sum(bool(reports(rank)) for rank in others) == len(others), 40)
        assert any(reports(rank)[0].startswith("RuntimeError") for rank in others)
