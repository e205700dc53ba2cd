"""Processes that run functions for this one: the ranks of `run_ranks`, the workers of an executor.

They are started by `subprocess`, not `multiprocessing`: the caller's script is not run again (it
needs no `__main__` guard), the global start method stays unset, DataLoader workers start as under
torchrun, and a worker can be killed with all that it started. For Linux and macOS.
"""

import functools
import inspect
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
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


Talk = Generator[None, None, Any]  # what is said to a worker; it yields to wait for its answer


class Failure(Exception):
    """`error` was raised in a worker at the time `when`; without one, the worker has died."""

    def __init__(self, when: float, error: BaseException | None) -> None:
        self.when, self.error = when, error


class Worker:
    """A process in a session of its own that runs one function at a time; `name` is for errors."""

    def __init__(
        self, name: str, env: Mapping[str, str], output: IO[bytes] | None = None, **keywords: Any
    ) -> None:
        self.name = name
        self._busy = False
        self.connection, theirs = Pipe()
        life, self._life = Pipe(duplex=False)  # for nothing but its end, with this process
        with theirs, life:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", BOOT, str(theirs.fileno()), str(life.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno(), life.fileno()],
                start_new_session=True,
            )
        try:
            with suppress(OSError):  # it is gone already: the first call says so
                self.connection.send((sys.path, sys.argv, __name__, os.getpid()))
                self.connection.send(keywords)
        except BaseException:
            self.end()
            raise

    @property
    def idle(self) -> bool:
        """Whether it lives, between two calls (when it has nothing to say but that it ended)."""
        ended = self._process.returncode is not None
        return not (ended or self._busy or self.connection.poll())

    def call(self, packed: bytes) -> Talk:
        """Return what the packed (run, func, args, kwargs) returns there, or raise Failure.

        The worker calls `run(func, args, kwargs, **keywords)`, with the keywords of this worker.
        """
        self._busy = True
        try:
            self.connection.send_bytes(packed)
            yield
            answer = self.connection.recv_bytes()
            failure = None if answer else self.connection.recv()
            self._busy = False
        except (EOFError, OSError):
            raise Failure(float("-inf"), None) from None
        if failure is None:
            return self._result(answer)
        raised_at, packed_error = failure
        error = unpack_exception(packed_error, self.name)
        if isinstance(error, SystemExit):  # raised here, it would end this process as well
            left = error
            error = RuntimeError(f"{self.name} exited with code {left.code!r}, by sys.exit")
            error.__cause__ = left
        raise Failure(raised_at, error)

    def leave(self) -> Talk:
        """Let the process run to its end; raise Failure if that is not a clean one."""
        with suppress(EOFError, OSError):
            self.connection.send_bytes(b"")
            yield
            self.connection.recv_bytes()
        if self.end():
            raise Failure(float("-inf"), None)

    def end(self) -> int:
        """Kill the process, if it still runs, and all that it started; return its exit code."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a zombie
                os.killpg(self._process.pid, signal.SIGKILL)
        self._life.close()
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
    talk: Callable[[Worker], Talk],
    timeout: timedelta | None = None,
) -> list[Any]:
    """Hold `talk(worker)` with all workers at once and return their results in order.

    The failure that came first is raised, or TimeoutError; workers that are busy then, or when the
    caller is interrupted, are killed. A death comes before exceptions, which are its notes: peers
    that lost their connection to a dead rank may report before its end is noticed.
    """
    talks = _Talks({worker: talk(worker) for worker in workers})
    try:
        with _ended_after(timeout, talks.running) as late:
            talks.hold()
    finally:
        for worker in talks.running:
            worker.end()
    failures = {worker: why for worker, why in talks.failures.items() if worker not in late}
    if failures:
        first = min(failures, key=lambda worker: failures[worker].when)
        raise failures[first].error or _death(first, [why.error for why in failures.values()])
    if missed := [worker.name for worker in late if worker not in talks.results]:
        raise TimeoutError(f"no result from {', '.join(missed)} within {timeout}")
    return [talks.results[worker] for worker in workers]


class _Talks:
    """Talks with several workers at once, by one thread: it goes on with the one that answers."""

    def __init__(self, running: dict[Worker, Talk]) -> None:
        self.running = running
        self.results: dict[Worker, Any] = {}
        self.failures: dict[Worker, Failure] = {}

    def hold(self) -> None:
        """Hold them to their end; after a failure, those that end SETTLE seconds later at most."""
        self._go_on(list(self.running))
        while not self.failures and (ready := self._ready(math.inf)):
            self._go_on(ready)
        settled = time.monotonic() + SETTLE
        while ready := self._ready(settled):
            self._go_on(ready)

    def _go_on(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            try:
                next(self.running[worker])
                continue
            except StopIteration as end:
                self.results[worker] = end.value
            except Failure as failure:
                self.failures[worker] = failure
            del self.running[worker]

    def _ready(self, deadline: float) -> list[Worker]:
        """Wait for workers that have answered, or died; none when all are through, or too late."""
        connections = {worker.connection: worker for worker in self.running}
        while connections and (left := deadline - time.monotonic()) > 0:
            # in short waits: an interrupt that another thread receives does not wake this one
            if answered := wait(list(connections), min(left, WAKE)):
                return [connections[connection] for connection in answered]  # type: ignore[index]
        return []


@contextmanager
def _ended_after(timeout: timedelta | None, running: Mapping[Worker, Talk]) -> Iterator[list]:
    """End the workers that are `running` when `timeout` is over, and put them into the list.

    From a thread: this one may wait for the rest of a message of a worker that is stopped.
    """
    late: list[Worker] = []

    def end() -> None:
        late.extend(list(running))
        for worker in late:
            worker.end()

    if timeout is None:
        yield late
        return
    timer = threading.Timer(min(timeout.total_seconds(), threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join()


def _death(worker: Worker, errors: Sequence[BaseException | None]) -> RuntimeError:
    """Return the error that says how `worker` ended; its cause may be in `errors`."""
    death = worker.death()
    for error in filter(None, errors):
        add_note(death, f"also {describe(error)}")
    return death


def serve(connection: Connection, descriptor: int, life: int, parent: int) -> None:
    """Answer the calls that come through `connection`, in the worker, until an empty one.

    `descriptor` stays open until the very end of the process: that is how the parent sees it.
    The other end of `life` closes with the parent: that is how the worker sees the parent's end.
    """
    _die_with(life)
    held = [descriptor]

    def release() -> None:
        connection.close()
        while held:  # a child's own child has nothing to close any more
            os.close(held.pop())

    os.register_at_fork(after_in_child=release)
    threading.Thread(target=_watch, args=(Connection(life), parent), daemon=True).start()
    try:
        keywords = connection.recv()
        while packed := connection.recv_bytes():
            _answer(connection, packed, keywords)
    except (EOFError, OSError):  # nobody listens any more
        os.killpg(0, signal.SIGKILL)


def _watch(life: Connection, parent: int) -> None:
    """End this process and its children when the parent is gone."""
    try:
        # A process that the parent forked may keep the other end: so who the parent is, as well.
        while os.getppid() == parent and not life.poll(PARENT_CHECK):
            pass
    finally:
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


def _answer(connection: Connection, packed: bytes, keywords: dict[str, Any]) -> None:
    """Run one call and send its result, or an empty message, when it raised, and what."""
    raised_at = None
    try:
        run, func, args, kwargs = loads(packed)
        _fill_main(func)
        answer = dumps("the result", run(func, args, kwargs, **keywords))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        raised_at, answer = time.monotonic(), pack_exception(error)
    if raised_at is None:
        connection.send_bytes(answer)
    else:
        connection.send_bytes(b"")
        connection.send((raised_at, answer))


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
