"""on_rank with faults: a rank dies, stops, is slow or is interrupted, while it works or waits."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from harness import Running, free_port, run, torchrun, wait_until

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


def reports(folder: Path, rank: int) -> list[dict]:
    """Return what the rank has reported so far."""
    file = folder / f"rank{rank}.json"
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # not there yet, or just being written
        return []


@pytest.mark.parametrize("dying", [0, 1])
def test_under_torchrun_the_death_of_any_rank_ends_all_of_them(dying, tmp_path):
    """Rank 0 works, and the others wait."""
    started = time.monotonic()
    result = run(*torchrun(3, SCRIPT, "one_dies", str(dying)), cwd=tmp_path)
    assert result.code == 1 and "SIGKILL" in result.stderr.upper()
    assert time.monotonic() - started < 50  # the work would take 60 seconds


@pytest.mark.parametrize("worker", [0, 1])
def test_ctrl_c_ends_all_ranks_cleanly(worker, tmp_path):
    """Rank 0 hosts the store: it works, or waits like the others."""
    with ranks(tmp_path, "interrupted", worker) as started:
        wait_until(lambda: all((tmp_path / f"waits{rank}").exists() for rank in range(WORLD)))
        time.sleep(0.5)
        for rank in started:
            rank.process.send_signal(signal.SIGINT)
        results = [rank.wait(20) for rank in started]
    assert [result.code for result in results] == [-signal.SIGINT] * WORLD, results
    assert not any("terminate called" in result.stderr for result in results)


def test_work_may_be_longer_than_the_timeout(tmp_path):
    with ranks(tmp_path, "slow") as started:
        assert [rank.wait().code for rank in started] == [0] * WORLD
    for rank in range(WORLD):
        assert [r["text"] for r in reports(tmp_path, rank)] == ["'done'", f"'usable by {WORLD}'"]


def test_a_stopped_rank_is_waited_for_unless_max_wait_is_set(tmp_path):
    """A stopped rank 0 would stop the store, too."""
    worker, others = 1, (0, 2)
    with ranks(tmp_path, "stopped", worker) as started:
        process = psutil.Process(started[worker].process.pid)
        for number in range(3):
            wait_until((tmp_path / "stopped").exists)
            (tmp_path / "stopped").unlink()
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
            time.sleep(8 if number == 1 else 0)  # longer than the timeout, but the others wait
            if number != 1:
                wait_until(lambda n=number: all(len(reports(tmp_path, r)) > n for r in others))
            else:
                assert all(len(reports(tmp_path, rank)) == 1 for rank in others)
            process.send_signal(signal.SIGCONT)
        assert [rank.wait().code for rank in started] == [0] * WORLD
    for rank in others:
        first, second, collective = reports(tmp_path, rank)
        assert first["type"] == "TimeoutError" and f": rank {worker} not ready" in first["text"]
        assert second["text"] == "'second'"
        assert collective["type"] is not None  # the all-reduce, after the group's timeout
    assert [result["text"] for result in reports(tmp_path, worker)[:2]] == ["'first'", "'second'"]
