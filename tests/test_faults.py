"""on_rank with faults: a rank dies, is slow or is interrupted, while it works or waits."""

import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness import Running, free_port, wait_until

SCRIPT = Path(__file__).with_name("fault_ranks.py")
WORLD = 3


@contextmanager
def ranks(folder: Path, scenario: str, world: int = WORLD) -> Iterator[list[Running]]:
    """Start the ranks without a launcher: torchrun would end all of them as soon as one ends."""
    common = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ExitStack() as stack:
        started = []
        for rank in range(world):
            env = {k: str(v) for k, v in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            running = Running(sys.executable, SCRIPT, scenario, cwd=folder, env=env)
            started.append(stack.enter_context(running))
        yield started


def reports(rank: Running) -> list[str]:
    """Return what the rank has reported so far."""
    return re.findall("^report: (.*)\n", rank.text(), re.MULTILINE)


def test_ctrl_c_ends_a_wait_at_once_and_leaves_no_rank_waiting(tmp_path):
    """The ranks that waited have left, so rank 0 gives up telling them what it has raised."""
    with ranks(tmp_path, "interrupted") as started:
        for number, rank in enumerate(started):
            rank.wait_for("waits" if number else "works")
        time.sleep(0.5)
        for rank in started[1:]:
            rank.process.send_signal(signal.SIGINT)
        wait_until(lambda: all(reports(rank) for rank in started[1:]), 3)
        assert not reports(started[0])
        started[0].process.send_signal(signal.SIGINT)
        assert [rank.wait(25).code for rank in started] == [0] * WORLD
        for rank in started:
            first, *others = reports(rank)
            assert first.startswith("KeyboardInterrupt")
            assert others == ["{'ranks': 3.0}", "'usable'"]


def test_work_may_be_longer_than_the_timeout(tmp_path):
    with ranks(tmp_path, "slow") as started:
        assert [rank.wait().code for rank in started] == [0] * WORLD
        assert [reports(rank) for rank in started] == [["'done'", f"usable by {WORLD}"]] * WORLD


def test_a_dead_rank_is_noticed_by_all_others_within_5_s(tmp_path):
    """Rank 0 has the store. Nobody ends the others; they catch the exception and keep it."""
    with ranks(tmp_path, "dies", world=8) as started:
        started[0].wait()
        died = time.monotonic()
        wait_until(lambda: all(reports(rank) for rank in started[1:]), 30)
        assert time.monotonic() - died < 5
        for rank in started[1:]:
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
