"""run_ranks: results and output in rank order, the first failure, and no process left behind."""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from contextlib import nullcontext, suppress
from datetime import timedelta
from threading import Thread

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import Running, wait_until, without_gloo

from ddp_ref import gather_objects, initialize_ddp, run_ranks, workers
from ddp_ref.launch import available_cores

LIMIT = timedelta(minutes=4)  # a test that hangs fails with a TimeoutError that names the ranks
Point = namedtuple("Point", "x y")


def test_ranks_meet_and_their_results_come_back_intact(capfd):
    def work(scale, *, extra):
        info = initialize_ddp()
        points = gather_objects(Point(info.rank, scale), to_all=True)
        return tuple(info), torch.tensor(info.rank), points, extra

    before = dict(os.environ)
    results = run_ranks(work, 2.0, extra={3}, nproc=3, timeout=LIMIT)
    for rank, (info, tensor, points, extra) in enumerate(results):
        assert info == (True, rank, rank, 3, torch.device("cpu"))
        assert tensor.item() == rank and extra == {3}
        assert points == [Point(other, 2.0) for other in range(3)] and type(points[0]) is Point
    assert dict(os.environ) == before
    assert capfd.readouterr().err == ""  # closing the open groups prints nothing


def test_ranks_get_torchruns_variables_and_none_of_an_outer_launch(monkeypatch):
    outer = {"SLURM_JOB_ID": "8", "RANK": "9", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def variables():
        dist.init_process_group("gloo", timeout=timedelta(minutes=1))
        dist.barrier()
        return dict(os.environ), torch.get_num_threads()

    for rank, (environ, threads) in enumerate(run_ranks(variables, nproc=2, timeout=LIMIT)):
        expected = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        expected |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1}
        assert {name: int(environ[name]) for name in expected} == expected
        assert "SLURM_JOB_ID" not in environ
        assert threads == max(1, available_cores() // 2)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (lambda: {}["key"], KeyError, "key"),
        (lambda: os.kill(os.getpid(), 9), RuntimeError, "rank 1 was killed by SIGKILL: did it run"),
        (lambda: sys.exit(0), RuntimeError, "sys.exit(0) was called: return or"),
    ],
    ids=["exception", "SIGKILL", "sys.exit"],
)
def test_the_first_failure_is_raised_with_its_type_and_rank(fault, error, text, capfd, monkeypatch):
    """Not the failure of its peer, whose connection is closed."""
    monkeypatch.setattr(workers, "FAILURE_WINDOW", 20)  # wait for both, on any machine
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # all output is shown even without it

    def work():
        initialize_ddp()
        print("written", end="")
        dist.barrier()  # both have printed before one fails
        if dist.get_rank() == 1:
            return fault()
        return dist.all_reduce(torch.ones(1))  # breaks when the failing rank is gone

    with pytest.raises(error) as caught:
        run_ranks(work, nproc=2, timeout=LIMIT)
    assert text in str(caught.value)
    if "was killed" not in text:
        (note,) = caught.value.__notes__
        assert note.startswith("raised on rank 1:\nTraceback (most recent call last)")
        assert "in work" in note
    out = without_gloo(capfd.readouterr().out)
    assert out == "".join(f"[rank {n}] written\n" for n in range(2))


def test_the_earliest_failure_is_raised_although_its_report_comes_last(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "FAILURE_WINDOW", 20)
    marker = tmp_path / "rank 1 has failed"

    class Slow(Exception):
        def __str__(self):
            marker.touch()
            time.sleep(1)
            return "slow to describe"

    def work():
        if os.environ["RANK"] == "1":
            raise Slow
        while not marker.exists():
            time.sleep(0.05)
        raise ValueError

    with pytest.raises(Slow):
        run_ranks(work, timeout=LIMIT)


def test_an_abort_and_a_closed_connection_do_not_hide_their_cause_that_is_reported_later():
    """C++ aborts a rank when it loses its peers at a bad moment."""

    def work():
        rank = initialize_ddp().rank
        if rank == 0:
            os.abort()
        with suppress(RuntimeError) if rank == 2 else nullcontext():
            dist.barrier()  # rank 0's connection is closed
        time.sleep(2)
        raise KeyError

    with pytest.raises(KeyError):
        run_ranks(work, nproc=3, timeout=LIMIT)


def test_an_exit_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="rank 0 exited with code 3 after func had returned: "):
        run_ranks(lambda: atexit.register(os._exit, 3) and None, nproc=1, timeout=LIMIT)


def test_a_failure_is_raised_at_once_although_a_thread_of_the_rank_still_runs():
    def work():
        Thread(target=time.sleep, args=(1000,)).start()
        raise IndexError

    with pytest.raises(IndexError):
        run_ranks(work, nproc=1, timeout=LIMIT)


def test_children_that_a_rank_leaves_behind_are_killed_and_do_not_hide_its_end():
    # The child holds the rank's output open.
    (child,) = run_ranks(lambda: subprocess.Popen(["sleep", "1000"]).pid, nproc=1, timeout=LIMIT)
    wait_until(lambda: not psutil.pid_exists(child), 30)


def test_a_stopped_rank_does_not_hide_another_ranks_failure(tmp_path, monkeypatch):
    """The stopped rank has not even read its job."""
    code = "import os, signal\nif os.environ.get('RANK') == '0': os.kill(0, signal.SIGSTOP)"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(IndexError):
        run_ranks(lambda data: data[-1, 0], torch.zeros(10), timeout=LIMIT)


def test_a_rank_that_has_returned_leaves_and_its_peers_notice():
    """They would wait for it in vain: it does not take part in their next collective."""

    def work():
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="onnection"):
                dist.all_reduce(torch.ones(1))

    run_ranks(work, timeout=timedelta(seconds=60))


def test_run_ranks_keeps_to_its_timeout_whatever_the_ranks_do(capfd):
    def ignore_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("started")
        os.system("sleep 1000")

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0, rank 1 did not end within 0:00:08"):
        run_ranks(ignore_sigterm, timeout=timedelta(seconds=8))
    assert time.monotonic() - start < 8 + 20
    assert "[rank 0] started" in capfd.readouterr().out


BLOCKED = """
import os, signal, sys, threading, time
from pathlib import Path
from ddp_ref import run_ranks

def work(how):
    print("blocked", end="", flush=True)
    Path(f"ready-{os.environ['RANK']}").touch()
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    os.system("sleep 1000")

def hold():  # a process that the parent forked keeps the connections to the ranks open
    while not Path("ready-1").exists():
        time.sleep(0.05)
    if os.fork() == 0:
        Path("holder").write_text(str(os.getpid()))
        time.sleep(1000)

if sys.argv[1] == "after a fork":
    threading.Thread(target=hold, daemon=True).start()
run_ranks(work, sys.argv[1])
"""


def test_an_interrupt_ends_all_ranks(tmp_path):
    (tmp_path / "script.py").write_text(BLOCKED)
    with Running(sys.executable, "script.py", "interrupted", cwd=tmp_path) as running:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 90)
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
        result = running.wait(timeout=30)
    assert result.stderr.rstrip().endswith("KeyboardInterrupt")
    assert result.stdout == "[rank 0] blocked\n[rank 1] blocked\n"
    assert result.code == -signal.SIGINT


@pytest.mark.parametrize("how", ["stopped", "after a fork"])
def test_no_rank_outlives_a_parent_that_is_killed(tmp_path, how):
    (tmp_path / "script.py").write_text(BLOCKED)
    holder = tmp_path / "holder"
    env = {"TMPDIR": str(tmp_path)}
    with Running(sys.executable, "script.py", how, cwd=tmp_path, env=env) as running:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 90)
        wait_until(lambda: how != "after a fork" or (holder.exists() and holder.read_text()))
        time.sleep(0.2)
        running.process.kill()
        assert not list(tmp_path.rglob("*job*"))  # the arguments, which may be large
        kept = {int(holder.read_text())} if holder.exists() else set()
        wait_until(lambda: {process.pid for process in running.processes()} == kept)
        running.kill()
