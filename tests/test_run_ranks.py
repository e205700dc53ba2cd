"""run_ranks: results and output in rank order, the first failure, and no process left behind."""

import contextlib
import os
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import Running, run, wait_until, without_gloo

from ddp_ref import run_ranks
from ddp_ref.initialize import initialize_ddp
from ddp_ref.workers import process

LIMIT = timedelta(minutes=4)  # a test that hangs fails with a TimeoutError that names the ranks
Point = namedtuple("Point", "x y")


def test_ranks_meet_and_their_results_come_back_intact(capfd):
    def work(scale, *, extra):
        info = initialize_ddp()
        total = torch.tensor([float(info.rank)])
        dist.all_reduce(total)
        points: list = [None] * info.world_size
        dist.all_gather_object(points, Point(info.rank, scale))
        return {"info": tuple(info), "total": total, "points": points, "extra": extra}

    before = dict(os.environ)
    results = run_ranks(work, 2.0, extra={3}, nproc=3, timeout=LIMIT)
    for rank, result in enumerate(results):
        assert result["info"] == (True, rank, rank, 3, torch.device("cpu"))
        assert result["total"].tolist() == [3.0]
        assert result["points"] == [Point(other, 2.0) for other in range(3)]
        assert type(result["points"][0]) is Point and result["extra"] == {3}
    assert dict(os.environ) == before
    assert capfd.readouterr().err == ""  # closing the open groups prints nothing


def test_output_of_ranks_and_their_children_is_printed_in_rank_order(capfd):
    def talk():
        rank = int(os.environ["RANK"])
        time.sleep(0.2 * (2 - rank))  # the last rank is the first to write
        print("one é")
        os.write(2, b"two\n")
        os.system("echo three; echo four >&2")
        print("five", file=sys.stderr)
        sys.stdout.write("no newline")

    assert run_ranks(talk, nproc=2, timeout=LIMIT) == [None, None]
    lines = ["one é", "two", "three", "four", "five", "no newline"]
    written = capfd.readouterr()
    assert written.out.splitlines() == [f"[rank {n}] {line}" for n in range(2) for line in lines]
    assert written.err == ""


def test_ranks_get_torchruns_variables_and_none_of_an_outer_launch(monkeypatch):
    outer = {"SLURM_PROCID": "7", "SLURM_JOB_ID": "8", "RANK": "9", "GROUP_RANK": "9"}
    outer |= {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "TORCHELASTIC_ERROR_FILE": "x"}
    for name, value in (outer | {"LOCAL_SCRATCH": "kept", "CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def variables(group):
        if group == "env":
            dist.init_process_group("gloo", timeout=timedelta(minutes=1))
            dist.barrier()
        return dict(os.environ), sys.argv, str(Path.cwd()), torch.get_num_threads()

    results = run_ranks(variables, "env", nproc=2, timeout=LIMIT)
    for rank, (environ, argv, folder, threads) in enumerate(results):
        expected = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        expected |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1}
        assert {name: int(environ[name]) for name in expected} == expected
        assert environ["MASTER_ADDR"] == "127.0.0.1" and int(environ["MASTER_PORT"]) > 1024
        assert environ["MASTER_PORT"] == results[0][0]["MASTER_PORT"]
        assert environ["LOCAL_SCRATCH"] == "kept"
        assert environ["CUDA_VISIBLE_DEVICES"] == ""  # an empty value counts: it hides all GPUs
        left = {name for name in environ if name.startswith("SLURM_")}
        assert not left and "TORCHELASTIC_ERROR_FILE" not in environ
        assert (argv, folder) == (sys.argv, str(Path.cwd()))
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        assert threads == max(1, (cores or 1) // 2)


FAULTS = {
    "exception": (lambda: {}["key"], KeyError, "key"),
    "SIGINT": (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, ""),
    "SIGKILL": (lambda: os.kill(os.getpid(), 9), RuntimeError, "rank {} was killed by SIGKILL"),
    "_exit": (lambda: os._exit(3), RuntimeError, "rank {} exited with code 3"),
    "sys.exit": (lambda: sys.exit(0), RuntimeError, "rank {} exited with code 0, by sys.exit"),
}
SILENT = {"SIGKILL", "_exit", "sys.exit"}  # they have no traceback of their own to show


@pytest.mark.parametrize(("rank", "kind"), [(n % 2, kind) for n, kind in enumerate(FAULTS)])
def test_the_first_failure_is_raised_with_its_type_and_rank(rank, kind, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # all output is shown even without it
    fault, error, text = FAULTS[kind]

    def work():
        initialize_ddp()
        print("written", end="")
        dist.barrier()  # both have printed before one fails
        if dist.get_rank() == rank:
            return fault()
        return dist.all_reduce(torch.ones(1))  # breaks when the failing rank is gone

    with pytest.raises(error) as caught:
        run_ranks(work, nproc=2, timeout=LIMIT)
    assert text.format(rank) in str(caught.value)
    if kind not in SILENT:
        (note,) = caught.value.__notes__
        assert note.startswith(f"raised on rank {rank}:\nTraceback (most recent call last)")
    out = without_gloo(capfd.readouterr().out)
    assert out == "".join(f"[rank {n}] written\n" for n in range(2))


def test_the_earliest_failure_wins_not_the_lowest_rank(monkeypatch):
    monkeypatch.setattr(process, "FAILURE_WINDOW", 20)  # wait for both, on any machine

    def work():
        initialize_ddp()
        dist.barrier()
        rank = dist.get_rank()
        time.sleep(0 if rank == 1 else 1)
        raise ValueError(rank)

    with pytest.raises(ValueError) as caught:
        run_ranks(work, timeout=LIMIT)
    assert caught.value.args == (1,)


def test_an_exception_on_another_rank_is_a_note_on_the_death_of_a_rank(monkeypatch):
    monkeypatch.setattr(process, "FAILURE_WINDOW", 20)  # wait for both, on any machine
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    def work(threads):
        initialize_ddp()
        assert torch.get_num_threads() == threads  # the user's OMP_NUM_THREADS wins
        dist.barrier()
        if dist.get_rank() == 0:
            raise ValueError("the cause")
        os._exit(3)

    with pytest.raises(RuntimeError, match="rank 1 exited with code 3") as caught:
        run_ranks(work, 2, timeout=LIMIT)
    (note,) = caught.value.__notes__
    assert note.startswith("also ") and "ValueError: the cause\nraised on rank 0:" in note


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("killed", "rank 1 was killed by SIGKILL"),
        ("exited", "rank 1 exited with code 3"),
        ("returned", None),
    ],
)
def test_a_child_that_a_rank_leaves_behind_is_killed_and_does_not_hide_its_end(end, text, tmp_path):
    def work():
        rank = os.environ["RANK"]
        child = os.fork()
        if child == 0:
            if end == "exited":
                os.execvp("sleep", ["sleep", "1000"])
            time.sleep(1000)  # it still holds the rank's output file open
        (tmp_path / rank).write_text(str(child))
        if rank == "1" and end != "returned":
            other = tmp_path / "0"
            while not (other.exists() and other.read_text()):  # when we end, rank 0 is killed
                time.sleep(0.05)
            os._exit(3) if end == "exited" else os.kill(os.getpid(), signal.SIGKILL)

    if text:
        with pytest.raises(RuntimeError, match=text):
            run_ranks(work, timeout=LIMIT)
    else:
        run_ranks(work, timeout=LIMIT)
    for rank in range(2):
        child = int((tmp_path / str(rank)).read_text())
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(child).wait(timeout=30)


def test_a_forked_child_of_a_rank_ends_with_the_function_and_sends_nothing(monkeypatch):
    # With four threads, torch crashes a forked child that exits, even without our package.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def work():
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        return child

    (child,) = run_ranks(work, nproc=1, timeout=LIMIT)
    assert child > 0


def test_a_stopped_rank_does_not_hide_another_ranks_failure(tmp_path, monkeypatch):
    code = "import os, signal\nif os.environ.get('RANK') == '0': os.kill(0, signal.SIGSTOP)"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    class Nothing(Exception):
        def __len__(self):
            return 0

    def work(data):
        raise Nothing

    with pytest.raises(Nothing):  # although the other rank has not even read its request
        run_ranks(work, torch.zeros(10_000_000), timeout=LIMIT)


def test_a_rank_that_has_returned_leaves_and_its_peers_notice():
    """They would wait for it in vain: it does not take part in their next collective."""

    def work():
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="onnection"):
                dist.all_reduce(torch.ones(1))

    run_ranks(work, timeout=timedelta(seconds=60))


def test_run_ranks_keeps_to_its_timeout_whatever_the_ranks_do(capfd):
    def ignore_sigterm(data):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("started")
        os.system("sleep 1000")

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0, rank 1 did not end within 0:00:08"):
        run_ranks(ignore_sigterm, torch.zeros(10_000_000), timeout=timedelta(seconds=8))
    assert time.monotonic() - start < 8 + 20
    assert "[rank 0] started" in capfd.readouterr().out
    with pytest.raises(TimeoutError):  # before the ranks have read their requests
        run_ranks(ignore_sigterm, torch.zeros(10_000_000), timeout=timedelta(milliseconds=1))


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "nproc must be an integer of at least 1, not 0", {"nproc": 0}),
        (TypeError, r"a timedelta above 0, such as one minute, not 60", {"timeout": 60}),
        (TypeError, "timeout must be a timedelta above 0", {"timeout": timedelta(0)}),
        (ValueError, "nproc must be an integer of at least 1, not True", {"nproc": True}),
        (TypeError, "func or an argument cannot be pickled", {"data": (n for n in ())}),
    ],
)
def test_a_bad_call_is_refused_before_anything_starts(error, text, call, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process started"))
    with pytest.raises(error, match=text):
        run_ranks(print, **call)


def test_simultaneous_launches_do_not_clash():
    def launch(number: int) -> list[int]:
        def add():
            initialize_ddp()
            total = torch.tensor(number)
            dist.all_reduce(total)
            return int(total)

        return run_ranks(add, timeout=LIMIT)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(launch, range(4))) == [[2 * n, 2 * n] for n in range(4)]


BLOCKED = """
import os, time, torch, torch.distributed as dist
from pathlib import Path
from ddp_ref import run_ranks
from ddp_ref.initialize import initialize_ddp

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index): return index ** 2

def work():
    initialize_ddp()
    batches = iter(torch.utils.data.DataLoader(Squares(), num_workers=1))
    next(batches)
    print("blocked", end="")
    Path(f"ready-{dist.get_rank()}").touch()
    if dist.get_rank() == 0:
        dist.barrier()  # the main thread is in C++ now, and stays there
    os.system("sleep 1000")

"""


@contextlib.contextmanager
def _blocked_ranks(folder: Path, before: str = "") -> Iterator[Running]:
    (folder / "script.py").write_text(f"{BLOCKED}{before}\nrun_ranks(work)\n")
    with Running(sys.executable, "script.py", cwd=folder) as running:
        wait_until(lambda: len(list(folder.glob("ready-*"))) == 2, 90)
        yield running


@pytest.mark.parametrize("whole_group", [False, True])
def test_an_interrupt_ends_all_ranks(tmp_path, whole_group):
    with _blocked_ranks(tmp_path) as running:
        pid = running.process.pid
        os.killpg(pid, signal.SIGINT) if whole_group else os.kill(pid, signal.SIGINT)
        result = running.wait(timeout=30)
        assert result.stderr.rstrip().endswith("KeyboardInterrupt")
        assert result.stdout == "[rank 0] blocked\n[rank 1] blocked\n"
        assert result.code == -signal.SIGINT


HOLDER = """
import threading

def hold():  # a process that the parent forked keeps the connections to the ranks open
    while not Path("ready-1").exists():
        time.sleep(0.05)
    if os.fork() == 0:
        Path("holder").write_text(str(os.getpid()))
        time.sleep(1000)

threading.Thread(target=hold, daemon=True).start()
"""


def test_no_rank_outlives_a_parent_that_is_killed_after_a_fork(tmp_path):
    with _blocked_ranks(tmp_path, HOLDER) as running:
        holder = tmp_path / "holder"
        wait_until(lambda: holder.exists() and holder.read_text())
        kept = int(holder.read_text())
        running.process.kill()
        wait_until(lambda: {process.pid for process in running.processes()} == {kept})
        os.kill(kept, signal.SIGKILL)


SCRIPT_OF_CLASSES = """
import functools
from typing import NamedTuple
import torch
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

for func in (gather, torch.no_grad()(gather), functools.partial(gather), Job(), Job().__call__):
    assert run_ranks(func) == [True, True], func
"""


def test_classes_of_the_script_are_found_through_decorators_partials_and_objects(tmp_path):
    (tmp_path / "tempfile.py").write_text("raise SystemExit('not the standard library')")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/script.py").write_text(SCRIPT_OF_CLASSES)
    result = run(sys.executable, "sub/script.py", cwd=tmp_path)
    assert result.code == 0, result.stderr


STUCK = """
import os, re, signal, sys
from ddp_ref import run_ranks

def stuck():
    print("here", flush=True)
    open(f"rank{os.environ['RANK']}", "w").close()
    if sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    re.match(r"(a+)+$", "a" * 45 + "b")  # holds the interpreter lock for years

run_ranks(stuck)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a signal for a closed pipe")
@pytest.mark.parametrize("how", ["stopped", "holds the lock"])
def test_a_stopped_or_blocked_rank_dies_when_its_parent_is_killed(tmp_path, how):
    (tmp_path / "script.py").write_text(STUCK)
    with Running(sys.executable, "script.py", how, cwd=tmp_path) as running:
        wait_until(lambda: len(list(tmp_path.glob("rank*"))) == 2)
        time.sleep(0.2)
        running.process.kill()
        running.wait()  # on leaving, Running asserts that no rank is left


@pytest.mark.parametrize("closing", ["sys.stdout.close()", "sys.stdout = open('/dev/full', 'w')"])
def test_a_stdout_that_cannot_print_loses_no_result_and_hides_no_error(tmp_path, closing):
    code = f"""if True:
        import sys, warnings
        from ddp_ref import run_ranks
        warnings.simplefilter("always")
        {closing}
        results = run_ranks(lambda: print("a line") or 7)
        try:
            run_ranks(lambda: print("a line") or {{}}["key"])
        except KeyError as error:
            print(results, repr(error), file=sys.stderr)
    """
    result = run(sys.executable, "-c", code, cwd=tmp_path)
    assert "[7, 7] KeyError('key')" in result.stderr
    assert result.stderr.count("cannot print the output of the ranks") == 2
