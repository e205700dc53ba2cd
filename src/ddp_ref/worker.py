"""Processes that run functions for this one: the ranks of `run_ranks`, the workers of an executor.

They are started by `subprocess`, not `multiprocessing`: the caller's script is not run again (it
needs no `__main__` guard), the global start method stays unset, DataLoader workers start as under
torchrun, and a worker can be killed with all that it started. For Linux and macOS.
"""

import functools
import inspect
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from io import BytesIO
from multiprocessing.connection import Connection, Pipe
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from struct import Struct
from typing import IO, Any, BinaryIO

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

SIZE = Struct("!Q")  # before a call: of how many bytes it is, 0 for the last
ANSWER = Struct("!dQ")  # before what it returns or raises: when it raised, else NaN, and the size
PIECE = 2**20  # bytes that are read at once at most

BOOT = """
import sys
sys.path = [path for path in sys.path if path]  # not the current folder: it may hold a tempfile.py
import importlib, os, pickle
descriptor, life = map(int, sys.argv[1:])
os.set_inheritable(descriptor, False)
os.set_inheritable(life, False)
calls = open(descriptor, "rb", closefd=False)
sys.path, sys.argv, module, parent = pickle.load(calls)
importlib.import_module(module).serve(calls, descriptor, life, parent)
"""

Talk = Generator[int, None, Any]  # what is said to a worker; it yields what it waits for


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
        self._connection, theirs = Pipe()
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
            with suppress(ConnectionError), open(self.fileno(), "wb", closefd=False) as stream:
                stream.write(pickle.dumps((sys.path, sys.argv, __name__, os.getpid())))
                stream.write(pickle.dumps(keywords))
            os.set_blocking(self.fileno(), False)  # one that is stopped keeps nobody waiting
        except BaseException:
            self.end()
            raise

    def fileno(self) -> int:
        """Return the descriptor that a selector looks at."""
        return self._connection.fileno()

    @property
    def idle(self) -> bool:
        """Whether it lives, and waits for a call: then it has nothing to say, not even its end."""
        return not (self._busy or self._life.closed or self._connection.poll())

    def call(self, packed: bytes) -> Talk:
        """Return what the packed (run, func, args, kwargs) returns there, or raise Failure.

        The worker calls `run(func, args, kwargs, **keywords)`, with the keywords of this worker.
        """
        self._busy = True
        try:
            yield from self._send(SIZE.pack(len(packed)), packed)
            raised_at, size = ANSWER.unpack((yield from self._receive(ANSWER.size)))
            answer = yield from self._receive(size)
            self._busy = False
        except (EOFError, ConnectionError):
            raise Failure(float("-inf"), None) from None
        if math.isnan(raised_at):
            return self._result(answer)
        error = unpack_exception(answer, self.name)
        if isinstance(error, SystemExit):  # raised here, it would end this process as well
            left = error
            error = RuntimeError(f"{self.name} exited with code {left.code!r}, by sys.exit")
            error.__cause__ = left
        raise Failure(raised_at, error)

    def leave(self) -> Talk:
        """Let the process run to its end; raise Failure if that is not a clean one."""
        with suppress(EOFError, ConnectionError):
            yield from self._send(SIZE.pack(0))
            yield from self._receive(1)
        if self.end():
            raise Failure(float("-inf"), None)

    def end(self) -> int:
        """Kill the process, if it still runs, and all that it started; return its exit code."""
        if not self._life.closed:  # else its number may be another's by now
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

    def _send(self, *parts: bytes) -> Talk:
        left = [memoryview(part) for part in parts]
        while left:
            try:
                sent = os.writev(self.fileno(), left)  # in one go: each write may wake the worker
            except BlockingIOError:
                yield EVENT_WRITE
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def _receive(self, size: int) -> Talk:
        message = BytesIO()
        while left := size - message.tell():
            try:
                piece = os.read(self.fileno(), min(left, PIECE))
            except BlockingIOError:
                yield EVENT_READ
                continue
            if not piece:
                raise EOFError
            message.write(piece)
        return message.getvalue()

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
    deadline = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
    talks = _Talks({worker: talk(worker) for worker in workers}, deadline)
    try:
        talks.hold()
    finally:
        for worker in talks.running:
            worker.end()
    if talks.failures:
        raise talks.first_failure()
    if talks.running:
        late = ", ".join(worker.name for worker in talks.running)
        raise TimeoutError(f"no result from {late} within {timeout}")
    return [talks.results[worker] for worker in workers]


class _Talks:
    """Talks with several workers at once, in one thread: it goes on with the one that is ready."""

    def __init__(self, running: dict[Worker, Talk], deadline: float) -> None:
        self.running, self.deadline = running, deadline
        self.results: dict[Worker, Any] = {}
        self.failures: dict[Worker, Failure] = {}

    def hold(self) -> None:
        """Go on until all have ended, the deadline, or SETTLE seconds after the first failure."""
        with DefaultSelector() as selector:
            for worker in list(self.running):
                selector.register(worker, EVENT_READ)
                self._go_on(worker, selector)
            while self.running and (left := self.deadline - time.monotonic()) > 0:
                # in short waits: an interrupt that another thread receives does not wake this one
                for key, _ in selector.select(min(left, WAKE)):
                    self._go_on(key.fileobj, selector)

    def first_failure(self) -> BaseException:
        """Return the error of the failure that came first, and forget all of them."""
        failures, self.failures = self.failures, {}  # an error's frames would keep them, and it
        first = min(failures, key=lambda worker: failures[worker].when)
        error = failures[first].error
        return _death(first, failures.values()) if error is None else error

    def _go_on(self, worker: Any, selector: DefaultSelector) -> None:
        try:
            selector.modify(worker, next(self.running[worker]))
            return
        except StopIteration as end:
            self.results[worker] = end.value
        except Failure as failure:
            self.failures[worker] = failure.with_traceback(None)  # which would keep this object
            self.deadline = min(self.deadline, time.monotonic() + SETTLE)
        selector.unregister(worker)
        del self.running[worker]


def _death(worker: Worker, failures: Iterable[Failure]) -> RuntimeError:
    """Return the error that says how `worker` ended; its cause may be in `failures`."""
    death = worker.death()
    for failure in failures:
        if failure.error is not None:
            add_note(death, f"also {describe(failure.error)}")
    return death


def serve(calls: BinaryIO, descriptor: int, life: int, parent: int) -> None:
    """Answer `calls`, in the worker, until an empty one.

    `descriptor` stays open until the very end of the process: that is how the parent sees it.
    The other end of `life` closes with the parent: that is how the worker sees the parent's end.
    """
    _die_with(life)
    held = [descriptor]

    def release() -> None:
        while held:  # a child's own child has nothing to close any more
            os.close(held.pop())

    os.register_at_fork(after_in_child=release)
    threading.Thread(target=_watch, args=(Connection(life), parent), daemon=True).start()
    keywords = pickle.load(calls)
    answers = open(descriptor, "wb", closefd=False)  # noqa: SIM115 - to the end of the process
    try:
        while held and _answer(calls, answers, keywords, held):
            pass
    except ConnectionError:
        if not held:
            raise  # what the function raised, in a child that it has forked
        os.killpg(0, signal.SIGKILL)  # nobody listens any more


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


def _answer(
    calls: BinaryIO, answers: BinaryIO, keywords: Mapping[str, Any], held: Sequence[int]
) -> bool:
    """Run the next call and send what it returns, or when it raised and what; False if none is.

    `held` is empty in a child that the function has forked: that ends as the function ends there.
    """
    packed = _next_call(calls)
    if not packed:
        return False
    raised_at = math.nan
    try:
        run, func, args, kwargs = loads(packed)
        del packed  # it may be large
        _fill_main(func)
        result = run(func, args, kwargs, **keywords)
        if not held:
            return True
        answer = dumps("the result", result)
    except BaseException as error:
        if not held:
            raise
        raised_at, answer = time.monotonic(), pack_exception(error)
    answers.write(ANSWER.pack(raised_at, len(answer)))
    answers.write(answer)
    answers.flush()
    return True


def _next_call(calls: BinaryIO) -> bytes:
    header = calls.read(SIZE.size)
    if len(header) == SIZE.size:
        (size,) = SIZE.unpack(header)
        packed = calls.read(size)
        if len(packed) == size:
            return packed
    raise ConnectionError("the parent has closed its end")


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
