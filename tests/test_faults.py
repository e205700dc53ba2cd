"""on_rank with faults: a rank stops, is slow or is interrupted, while it works or waits."""

import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from harness import Running, free_port, wait_until

SCRIPT = Path(__file__).with_name("fault_ranks.py")
WORLD = 3


@contextmanager
def ranks(folder: Path, *arguments: object) -> Iterator[list[Running]]:
    """Start the ranks without a launcher: torchrun would end all of them as soon as one ends."""
    common = {"WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ExitStack() as stack:
        started = []
        for rank in range(WORLD):
            env = {k: str(v) for k, v in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            command = [sys.executable, SCRIPT, *map(str, arguments)]
            started.append(stack.enter_context(Running(*command, cwd=folder, env=env)))
        yield started


def reports(rank: Running) -> list[str]:
    """Return what the rank has reported so far."""
    return re.findall("^report: (.*)\n", rank.text(), re.MULTILINE)


@pytest.mark.parametrize("worker", [0, 1])
def test_ctrl_c_ends_all_ranks_cleanly(worker, tmp_path):
    """Rank 0 hosts the store: it works, or waits like the others."""
    with ranks(tmp_path, "interrupted", worker) as started:
        for number, rank in enumerate(started):
            rank.wait_for("works" if number == worker else "waits")
        time.sleep(0.5)
        for rank in started:
            rank.process.send_signal(signal.SIGINT)
        results = [rank.wait(20) for rank in started]
    assert [result.code for result in results] == [-signal.SIGINT] * WORLD, results
    assert not any("terminate called" in result.stderr for result in results)


def test_work_may_be_longer_than_the_timeout(tmp_path):
    with ranks(tmp_path, "slow") as started:
        assert [rank.wait().code for rank in started] == [0] * WORLD
        assert [reports(rank) for rank in started] == [["'done'", f"usable by {WORLD}"]] * WORLD


def test_a_stopped_rank_is_waited_for_unless_max_wait_is_set(tmp_path):
    """A stopped rank 0 would stop the store, too."""
    with ranks(tmp_path, "stopped") as started:
        one, worker, two = started
        process = psutil.Process(worker.process.pid)
        for number in range(3):
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
            if number == 1:
                time.sleep(8)  # longer than the timeout, but the others wait
                assert len(reports(one)) == len(reports(two)) == 1
            else:
                wait_until(lambda n=number: min(len(reports(one)), len(reports(two))) > n)
            process.send_signal(signal.SIGCONT)
        assert [rank.wait().code for rank in started] == [0] * WORLD
        for rank in (one, two):
            first, second, collective = reports(rank)
            assert first.startswith("TimeoutError ") and ": rank 1 not ready" in first
            assert second == "'second'"
            assert collective != "None"  # the all-reduce failed, after the group's timeout
        assert reports(worker)[:2] == ["'first'", "'second'"]
