"""run_ranks: results and output in rank order, the first failure, and no process left behind."""

import atexit
import os
import resource
import signal
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import Running, run, wait_until, without_gloo

from ddp_ref import gather_objects, initialize_ddp, run_ranks, workers
from ddp_ref.launch import available_cores

LIMIT = timedelta(minutes=4)  # a test that hangs fails with a TimeoutError that names the ranks
Point = namedtuple("Point", "x y")


def test_simultaneous_launches_do_not_clash():
    def launch(number):
        return run_ranks(lambda: initialize_ddp() and gather_objects(number, True), timeout=LIMIT)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(launch, range(2))] == [[[number] * 2] * 2 for number in range(2)]


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


def test_output_of_ranks_and_their_children_is_printed_in_rank_order(capfd):
    def talk():
        time.sleep(0.2 * (2 - int(os.environ["RANK"])))  # the last rank is the first to write
        print("one é")
        os.write(2, b"two\n")
        os.system("echo three; echo four > /dev/stderr")  # this would empty a file
        sys.stdout.write("no newline")

    assert run_ranks(talk, nproc=2, timeout=LIMIT) == [None, None]
    lines = ["one é", "two", "three", "four", "no newline"]
    written = capfd.readouterr()
    assert written.out.splitlines() == [f"[rank {n}] {line}" for n in range(2) for line in lines]
    assert written.err == ""


def test_ranks_get_torchruns_variables_and_none_of_an_outer_launch(monkeypatch):
    outer = {"SLURM_PROCID": "7", "SLURM_JOB_ID": "8", "RANK": "9", "GROUP_RANK": "9"}
    outer |= {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "TORCHELASTIC_ERROR_FILE": "x"}
    by_mpi = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    outer |= dict.fromkeys(by_mpi, "4")
    kept = {"LOCAL_SCRATCH": "kept", "CUDA_VISIBLE_DEVICES": ""}  # an empty value hides all GPUs
    for name, value in (outer | kept).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sys, "path", [Path("ignored"), *sys.path])  # as Python ignores it

    def variables():
        dist.init_process_group("gloo", timeout=timedelta(minutes=1))
        dist.barrier()
        return dict(os.environ), sys.argv, sys.path, str(Path.cwd()), torch.get_num_threads()

    results = run_ranks(variables, nproc=2, timeout=LIMIT)
    for rank, (environ, argv, path, folder, threads) in enumerate(results):
        expected = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        expected |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1}
        assert {name: int(environ[name]) for name in expected} == expected
        assert environ["MASTER_ADDR"] == "127.0.0.1" and kept.items() <= environ.items()
        assert not {*outer} - {*expected, "MASTER_ADDR", "MASTER_PORT"} & {*environ}
        assert (argv, path, folder) == (sys.argv, sys.path[1:], str(Path.cwd()))
        assert threads == max(1, available_cores() // 2)


FAULTS = {
    "exception": (lambda: {}["key"], KeyError, "key"),
    "SIGINT": (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, ""),
    "SIGKILL": (
        lambda: os.kill(os.getpid(), 9),
        RuntimeError,
        "rank {} was killed by SIGKILL: did it run",
    ),
    "_exit": (lambda: os._exit(3), RuntimeError, "rank {} exited with code 3: look at its"),
    "sys.exit": (lambda: sys.exit(0), RuntimeError, "sys.exit(0) was called: return or"),
}


@pytest.mark.parametrize(("rank", "kind"), [(n % 2, kind) for n, kind in enumerate(FAULTS)])
def test_the_first_failure_is_raised_with_its_type_and_rank(rank, kind, capfd, monkeypatch):
    """Not the failure of its peer, whose connection is closed."""
    monkeypatch.setattr(workers, "FAILURE_WINDOW", 20)  # wait for both, on any machine
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # all output is shown even without it
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    fault, error, text = FAULTS[kind]

    def work():
        initialize_ddp()
        assert torch.get_num_threads() == 2  # the user's OMP_NUM_THREADS wins
        print("written", end="")
        dist.barrier()  # both have printed before one fails
        if dist.get_rank() == rank:
            return fault()
        return dist.all_reduce(torch.ones(1))  # breaks when the failing rank is gone

    with pytest.raises(error) as caught:
        run_ranks(work, nproc=2, timeout=LIMIT)
    assert text.format(rank) in str(caught.value)
    notes = getattr(caught.value, "__notes__", [])
    if "rank {}" not in text:
        assert notes[0].startswith(f"raised on rank {rank}:\nTraceback (most recent call last)")
        assert "in work" in notes[0]
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


def test_a_closed_connection_does_not_hide_its_cause_that_is_reported_later():
    def work():
        rank = initialize_ddp().rank
        try:
            if rank == 0:
                dist.barrier()
            raise KeyError
        finally:
            dist.destroy_process_group()  # now the other rank's connection is closed
            time.sleep(2 * rank)

    with pytest.raises(KeyError):
        run_ranks(work, timeout=LIMIT)


def test_an_abort_does_not_hide_its_cause_that_is_reported_later(tmp_path):
    """C++ aborts a rank when it loses its peers at a bad moment."""
    aborted = tmp_path / "rank 0 has aborted"

    def work():
        if os.environ["RANK"] == "0":
            aborted.touch()
            os.abort()
        while not aborted.exists():
            time.sleep(0.05)
        time.sleep(1)
        raise KeyError

    with pytest.raises(KeyError):
        run_ranks(work, timeout=LIMIT)


def test_an_exit_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="rank 0 exited with code 3 after func had returned: "):
        run_ranks(lambda: atexit.register(os._exit, 3) and None, nproc=1, timeout=LIMIT)


def test_a_result_that_cannot_be_written_says_why():
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
        return bytes(10**6)

    with pytest.raises(OSError, match="File too large"):
        run_ranks(work, nproc=1, timeout=LIMIT)


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


@pytest.mark.parametrize("debug", [breakpoint, dist.breakpoint])
def test_breakpoint_says_how_to_debug_instead(debug, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "")  # the same as unset
    with pytest.raises(RuntimeError, match=r"needs a terminal.* start it with torchrun") as caught:
        run_ranks(debug, nproc=1, timeout=LIMIT)
    assert "\n" not in str(caught.value)


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
    with pytest.raises(TimeoutError):  # before the ranks have read their job
        run_ranks(ignore_sigterm, timeout=timedelta(milliseconds=1))


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "nproc must be an integer of at least 1, not 0", {"nproc": 0}),
        (TypeError, r"a timedelta above 0, such as one minute, not 60", {"timeout": 60}),
        (TypeError, "timeout must be a timedelta above 0", {"timeout": timedelta(0)}),
        (TypeError, "func or an argument cannot be pickled", {"data": (n for n in ())}),
    ],
)
def test_a_bad_call_is_refused_before_anything_starts(error, text, call, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process started"))
    with pytest.raises(error, match=text):
        run_ranks(print, **call)


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a signal for a closed pipe")
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


SCRIPT_OF_CLASSES = """
import functools
from typing import NamedTuple
import torch.distributed as dist
from ddp_ref import initialize_ddp, run_ranks

class Mine(NamedTuple):
    rank: int

def gather():
    initialize_ddp()
    found = [None, None]
    dist.all_gather_object(found, Mine(dist.get_rank()))
    return found == [Mine(0), Mine(1)]

class Job:
    def __call__(self):
        return gather()

for func in (functools.partial(gather), Job()):
    assert run_ranks(func) == [True, True], func
"""


def test_classes_of_the_script_are_found_through_partials_and_objects(tmp_path):
    (tmp_path / "tempfile.py").write_text("raise SystemExit('not the standard library')")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/script.py").write_text(SCRIPT_OF_CLASSES)
    result = run(sys.executable, "sub/script.py", cwd=tmp_path)
    assert result.code == 0, result.stderr


def test_a_stdout_that_cannot_print_loses_no_result_and_hides_no_error(tmp_path):
    code = """if True:
        import sys, warnings
        from ddp_ref import run_ranks
        warnings.simplefilter("always")
        sys.stdout.close()
        results = run_ranks(lambda: print("a line") or 7)
        sys.stdout = open("/dev/full", "w")
        try:
            run_ranks(lambda: print("a line") or {}["key"])
        except KeyError as error:
            print(results, repr(error), file=sys.stderr)
    """
    result = run(sys.executable, "-c", code, cwd=tmp_path)
    assert "[7, 7] KeyError('key')" in result.stderr
    assert result.stderr.count("cannot print the output of the ranks") == 2
