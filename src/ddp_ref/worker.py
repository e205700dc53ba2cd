"""Processes that run functions for this one: the ranks of `run_ranks`, the workers of an executor.

They are started by `subprocess`, not `multiprocessing`: the caller's script is not run again (it
needs no `__main__` guard), the global start method stays unset, DataLoader workers start as under
torchrun, and a worker can be killed with all that it started. For Linux and macOS.
"""

import functools
import inspect
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from .environment import MASTER_NAMES, RANK_NAMES, available_cores
from .errors import add_note, describe, pack_exception, unpack_exception
from .pickling import dumps, loads

LAUNCH_PREFIXES = ("SLURM_", "TORCHELASTIC_")
LAUNCH_NAMES = {*RANK_NAMES, *MASTER_NAMES, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
LAUNCH_NAMES |= {"ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
PARENT_CHECK = 1.0  # seconds between two looks whether the parent is still there
WAKE = 0.2  # seconds after which a waiting parent feels an interrupt at the latest
DYING = 2.0  # seconds from the end of a connection to that of its process
SETTLE = 0.25  # seconds in which failures count as simultaneous: a death may be noticed last

BOOT = """
import sys
sys.path = [path for path in sys.path if path]  # not the current folder: it may hold a tempfile.py
import importlib, os
from multiprocessing.connection import Connection
descriptor, life = map(int, sys.argv[1:])
os.set_inheritable(descriptor, False)
os.set_inheritable(life, False)
connection = Connection(os.dup(descriptor))
sys.path, sys.argv, module, parent = connection.recv()
importlib.import_module(module).serve(connection, descriptor, life, parent)
"""


class Failure(Exception):
    """`error` was raised in a worker at the time `when`; without one, the worker has died."""

    def __init__(self, when: float, error: BaseException | None) -> None:
        self.when, self.error = when, error


class Worker:
    """A process in a session of its own that runs one function at a time; `name` is for errors."""

    def __init__(
        self, name: str, env: Mapping[str, str], output: IO[bytes] | None = None, **keywords: Any
    ) -> None:
        self.name, self._keywords = name, keywords
        self._busy = False
        self._connection, theirs = Pipe()
        life, self._life = os.pipe()  # nothing is ever written: its end is this process's end
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", BOOT, str(theirs.fileno()), str(life)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno(), life],
                start_new_session=True,
            )
        try:
            os.close(life)
            with suppress(OSError):  # it is gone already: the first call says so
                self._connection.send((sys.path, sys.argv, __name__, os.getpid()))
        except BaseException:
            self.end()
            raise

    @property
    def idle(self) -> bool:
        """Whether it lives, between two calls (when it has nothing to say but that it ended)."""
        ended = self._process.returncode is not None
        return not (ended or self._busy or self._connection.poll())

    def call(self, packed: bytes) -> Any:
        """Return what the packed (run, func, args, kwargs) returns there, or raise Failure.

        The worker calls `run(func, args, kwargs, **keywords)`, with the keywords of this worker.
        """
        self._busy = True
        try:
            self._connection.send(self._keywords)
            self._connection.send_bytes(packed)
            raised_at = self._connection.recv()
            answer = self._connection.recv_bytes()
            self._busy = False
        except (EOFError, OSError):
            raise Failure(float("-inf"), None) from None
        if raised_at is None:
            return self._result(answer)
        error = unpack_exception(answer, self.name)
        if isinstance(error, SystemExit):  # raised here, it would end this process as well
            left = error
            error = RuntimeError(f"{self.name} exited with code {left.code!r}, by sys.exit")
            error.__cause__ = left
        raise Failure(raised_at, error)

    def leave(self) -> None:
        """Let the process run to its end; raise Failure if that is not a clean one."""
        with suppress(EOFError, OSError):
            self._connection.send(None)
            self._connection.recv_bytes()
        if self.end():
            raise Failure(float("-inf"), None)

    def end(self) -> int:
        """Kill the process, if it still runs, and all that it started; return its exit code."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a zombie
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        return self._process.wait()

    def death(self) -> RuntimeError:
        """Return the error that says how the process ended."""
        try:
            self._process.wait(DYING)
        except subprocess.TimeoutExpired:
            self.end()
            return RuntimeError(f"{self.name} closed its connection, and was killed")
        code = self.end()
        if code >= 0:
            return RuntimeError(f"{self.name} exited with code {code}")
        names = {number.value: number.name for number in signal.Signals}
        return RuntimeError(f"{self.name} was killed by {names.get(-code, f'signal {-code}')}")

    def _result(self, answer: bytes) -> Any:
        try:
            return loads(answer)
        except Exception as error:
            message = f"the result of {self.name} cannot be unpickled: {error}"
            raise Failure(time.monotonic(), TypeError(message)) from error


def run_all(
    workers: Sequence[Worker],
    talk: Callable[[Worker], Any],
    pool: futures.Executor,
    timeout: timedelta | None = None,
) -> list[Any]:
    """Hold `talk(worker)` with all workers at once and return their results in order.

    `pool` has a thread for each of them. The failure that came first is raised, or TimeoutError;
    workers that are busy then, or when the caller is interrupted, are killed. A death comes before
    exceptions, which are its notes: peers that lost their connection to a dead rank may report
    before its end is noticed.
    """
    talks: dict[futures.Future, Worker] = {}
    try:
        for worker in workers:
            talks[pool.submit(talk, worker)] = worker
        if _wait(talks, timeout):
            futures.wait(talks, SETTLE)
        failed = _failures(talks)
        late = [worker.name for future, worker in talks.items() if not future.done()]
    finally:
        done = {worker for future, worker in talks.items() if future.done()}
        for worker in set(workers) - done:
            worker.end()
    if failed:
        first, worker = min(failed, key=lambda pair: pair[0].when)
        raise first.error or _death(worker, [failure.error for failure, _ in failed])
    if late:
        raise TimeoutError(f"no result from {', '.join(late)} within {timeout}")
    return [future.result() for future in talks]


def _death(worker: Worker, errors: Sequence[BaseException | None]) -> RuntimeError:
    """Return the error that says how `worker` ended; its cause may be in `errors`."""
    death = worker.death()
    for error in filter(None, errors):
        add_note(death, f"also {describe(error)}")
    return death


def _wait(talks: Mapping[futures.Future, Worker], timeout: timedelta | None) -> bool:
    """Wait for the end of all talks, or `timeout`, or a failure: then return True."""
    deadline = time.monotonic() + (math.inf if timeout is None else timeout.total_seconds())
    running = set(talks)
    while running and not _failures(talks) and (left := deadline - time.monotonic()) > 0:
        # in short waits: an interrupt that another thread receives does not wake this one
        running = futures.wait(talks, min(left, WAKE), futures.FIRST_EXCEPTION).not_done
    return bool(_failures(talks))


def _failures(talks: Mapping[futures.Future, Worker]) -> list[tuple[Failure, Worker]]:
    errors = [(future.exception(), worker) for future, worker in talks.items() if future.done()]
    return [(error, worker) for error, worker in errors if isinstance(error, Failure)]


def serve(connection: Connection, descriptor: int, life: int, parent: int) -> None:
    """Run the calls that come through `connection`, in the worker, until it is told to leave.

    `descriptor` stays open until the very end of the process: that is how the parent sees it.
    The other end of `life` closes with the parent: that is how the kernel sees the parent's end.
    """
    _die_with(life)
    held = [descriptor]

    def release() -> None:
        connection.close()
        while held:  # a child's own child has nothing to close any more
            os.close(held.pop())

    os.register_at_fork(after_in_child=release)
    calls: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, calls, parent), daemon=True).start()
    while _answer(connection, calls.get()):
        pass


def _listen(connection: Connection, calls: queue.SimpleQueue, parent: int) -> None:
    """Pass the parent's calls on; when the parent is gone, end this process and its children."""
    try:
        while os.getppid() == parent:  # a process that the parent forked may keep the other end
            if connection.poll(PARENT_CHECK):
                keywords = connection.recv()
                calls.put(None if keywords is None else (keywords, connection.recv_bytes()))
    except (EOFError, OSError):
        pass  # the parent is gone, or has closed its side
    finally:  # whatever it was: nobody listens any more
        os.killpg(0, signal.SIGKILL)


def _die_with(life: int) -> None:
    """Let the kernel kill this process and its children when the parent's end of `life` closes.

    For a worker that is stopped, or holds the interpreter lock, so that no thread of it can look.
    """
    if sys.platform == "linux":
        import fcntl  # Windows has none, and doctor must start there to say so

        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())  # a signal for the whole process group
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)


def _answer(connection: Connection, call: tuple[dict[str, Any], bytes] | None) -> bool:
    """Run one call and send its result, or when it raised and what; None is the call to leave."""
    if call is None:
        return False
    keywords, packed = call
    raised_at = None
    try:
        run, func, args, kwargs = loads(packed)
        _fill_main(func)
        answer = dumps("the result", run(func, args, kwargs, **keywords))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        raised_at, answer = time.monotonic(), pack_exception(error)
    connection.send(raised_at)
    connection.send_bytes(answer)
    return True


def _fill_main(func: Any) -> None:
    """Give `__main__` what `func` knows of the caller's: pickle looks classes up there by name."""
    func = _innermost(func)
    if getattr(func, "__module__", None) == "__main__":
        known = getattr(func, "__globals__", {}).items()
        # not __file__: with it, multiprocessing would run the caller's script again
        own = {name: value for name, value in known if not name.startswith("__")}
        vars(sys.modules["__main__"]).update(own)


def _innermost(func: Any) -> Any:
    """Return the function inside decorators, partials, methods and objects that can be called."""
    if isinstance(func, functools.partial):
        return _innermost(func.func)
    if hasattr(func, "__wrapped__"):
        return _innermost(func.__wrapped__)
    if inspect.ismethod(func):
        return _innermost(func.__func__)
    if inspect.isroutine(func) or isinstance(func, type):
        return func
    return type(func).__call__


def worker_environment(workers: int) -> dict[str, str]:
    """Return the variables for one of `workers` processes: none of a launch this one is part of.

    Each has its part of the cores, unless OMP_NUM_THREADS is set.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_NAMES and not name.startswith(LAUNCH_PREFIXES)
    }
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, available_cores() // workers)
    return kept | {"OMP_NUM_THREADS": str(threads)}
