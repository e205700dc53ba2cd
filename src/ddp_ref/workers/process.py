"""Worker processes: how to start, call and stop them, and the loop that each of them runs.

They are started by `subprocess`, not by `multiprocessing`. So the caller's script is not run again
and needs no `__main__` guard, the global start method stays unset, and a worker can be killed with
everything it started in its own session. For Linux and macOS.

DataLoader workers start as they do under torchrun, but those that are not forked (on macOS, or with
`multiprocessing_context="spawn"`) do not find classes of the caller's `__main__`: put the data set
into a module.
"""

import functools
import math
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import cloudpickle
import torch

from .._outcomes import add_note, describe, pack_exception, unpack_exception
from ..environment import RANK_NAMES, available_cores
from ..slurm import MASTER_NAMES
from .serialization import dumps

LAUNCH_NAMES = {*RANK_NAMES, *MASTER_NAMES, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
LAUNCH_PREFIXES = ("SLURM_", "TORCHELASTIC_", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
LEAVE = b""  # the request that ends a worker
DIED = -math.inf  # the time of a worker's death, so that it sorts before all exceptions
FAILURE_WINDOW = 0.25  # seconds to keep collecting failures: a later report may be the real cause
WAKE = 0.2  # seconds between checks for Ctrl-C, which another thread may have received
PARENT_CHECK = 1.0  # seconds between a worker's checks that its parent is alive

BOOT = """
import sys; sys.path = [path for path in sys.path if path]  # not the current folder's modules
import importlib, pickle
from multiprocessing.connection import Connection
connection, parent_alive = (Connection(int(number)) for number in sys.argv[1:])
module, parent, device, sys.path, sys.argv = pickle.loads(connection.recv_bytes())
importlib.import_module(module).serve(connection, parent_alive, parent, device)
"""


class Failure(NamedTuple):
    """Why a worker has no result."""

    error: BaseException
    when: float = DIED  # by time.monotonic(), which is the same clock in all processes


class Worker:
    """A process in a session of its own that runs one function at a time."""

    def __init__(self, name: str, env: dict[str, str], device: str, output: Any = None) -> None:
        """Start the process.

        Args:
            name: What error messages call the worker.
            env: Its environment variables.
            device: Its device. A GPU becomes the current CUDA device before each call, so GPU
                arguments arrive on it. With "", functions choose their device themselves.
            output: A file for its stdout and stderr. None: the stdout and stderr of this process.
        """
        self.name = name
        self._connection, theirs = Pipe()
        parent_alive, self._parent_alive = Pipe(duplex=False)  # closes when this process ends
        with theirs, parent_alive:
            fds = theirs.fileno(), parent_alive.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", BOOT, *map(str, fds)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=fds,
                start_new_session=True,
            )
        with suppress(OSError):  # it is dead already: its first call says so
            start = __name__, os.getpid(), device, sys.path, sys.argv
            self._connection.send_bytes(pickle.dumps(start))
        # Sending and receiving block, so a thread does it. It ends with this object.
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        Thread(target=_run_calls, args=(self.calls,), daemon=True).start()
        weakref.finalize(self, self.calls.put, None)

    @property
    def alive(self) -> bool:
        """Whether an idle worker still waits for a request."""
        return not self._connection.poll()

    def call(self, request: bytes) -> Any:
        """Send a request and return the result of the function, or a Failure (blocking)."""
        try:
            try:
                self._connection.send_bytes(request)
                packed = self._connection.recv_bytes()
            except (EOFError, OSError):
                return self._end(request)
            raised_at, value = pickle.loads(packed)
        except BaseException as error:  # noqa: BLE001 - unpickling runs the user's code
            text = f"the result of {self.name} cannot be unpickled: {error!r}; return plain data"
            return Failure(TypeError(text), time.monotonic())
        if raised_at is None:
            return value
        raised = unpack_exception(value, self.name)
        if isinstance(raised, SystemExit):  # raised here, it would end this process as well
            how = f"exited with code {raised.code!r}, by sys.exit: return or raise instead"
            exited = RuntimeError(f"{self.name} {how}")
            exited.__cause__ = raised
            return Failure(exited, raised_at)
        return Failure(raised, raised_at)

    def _end(self, request: bytes) -> Failure | None:
        """Return how the process ended, after its connection closed; None if LEAVE ended it."""
        code = self.kill()  # a process that is already exiting keeps its exit code
        if code == 0 and request == LEAVE:
            return None
        names = {-number.value: f"was killed by {number.name}" for number in signal.Signals}
        how = names.get(code, f"exited with code {code}")
        hint = "did it run out of memory?" if code == -signal.SIGKILL else "look at its output"
        return Failure(RuntimeError(f"{self.name} {how}: {hint}"))

    def kill(self) -> int:
        """Kill the process, if it still runs, and all that it started; return its exit code."""
        if self._process.returncode is None:  # else its number may belong to another process
            with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a zombie
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def _run_calls(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while call := calls.get():
        call()
        del call  # it refers to the worker, which must be freed before the next `get` returns


def run_all(
    workers: Sequence[Worker], request: bytes, timeout: timedelta | None = None, leave: bool = False
) -> list[Any]:
    """Send a request to all workers at the same time and wait for the results.

    Workers that still run when another fails, the time is over or the caller is interrupted are
    killed.

    Args:
        workers: Idle workers.
        request: `(run, func, args, kwargs)` as `dumps` packs it, so that each worker calls
            `run(device, func, args, kwargs)`. Or LEAVE, which ends it.
        timeout: How long all of it may take (None: no limit).
        leave: Whether each worker also ends, as soon as it has returned its result.

    Returns:
        The results, in the order of the workers.

    Raises:
        BaseException: The first error. If a worker died, this is a RuntimeError that names it, with
            the other workers' exceptions as notes, because a rank may fail when its peer dies and
            report that before the death is noticed.
        TimeoutError: If workers have not answered in time. It names them.
    """
    deadline = time.monotonic() + (timeout.total_seconds() if timeout else math.inf)
    queue: SimpleQueue[tuple[Worker, Any]] = SimpleQueue()
    answers: dict[Worker, Any] = {}
    try:
        for worker in workers:
            worker.calls.put(functools.partial(_call, worker, request, leave, queue))
        while len(answers) < len(workers) and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                worker, answers[worker] = queue.get(timeout=min(left, WAKE))
                if isinstance(answers[worker], Failure):
                    deadline = min(deadline, time.monotonic() + FAILURE_WINDOW)
        if any(isinstance(answer, Failure) for answer in answers.values()):
            raise _earliest(answers.values())
        if late := ", ".join(worker.name for worker in workers if worker not in answers):
            advice = "pass a longer timeout, or look for a thread or process that it left running"
            raise TimeoutError(f"{late} did not end within {timeout}: {advice}")
        return [answers[worker] for worker in workers]
    finally:
        for worker in workers:
            if worker not in answers:
                worker.kill()
        answers.clear()  # otherwise an error and this frame would keep each other alive


def _call(worker: Worker, request: bytes, leave: bool, queue: "SimpleQueue[Any]") -> None:
    """Put the worker and its answer into `queue`; the worker's thread runs this."""
    answer = worker.call(request)
    if leave and not isinstance(answer, Failure):
        answer = worker.call(LEAVE) or answer
    queue.put((worker, answer))


def _earliest(answers: Iterable[Any]) -> BaseException:
    """Return the earliest error. If it is a worker's death, add the other errors as notes."""
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    first, *others = sorted(failures, key=lambda failure: failure.when)
    for other in others if first.when == DIED else ():
        add_note(first.error, f"also {describe(other.error)}")
    return first.error


def worker_environment(workers: int) -> dict[str, str]:
    """Return the environment variables for one of `workers` processes.

    The variables of a launch that this process is part of are left out. Each worker gets its share
    of the cores, unless OMP_NUM_THREADS is set.
    """
    names = {name for name in os.environ if not name.startswith(LAUNCH_PREFIXES)} - LAUNCH_NAMES
    kept = {name: os.environ[name] for name in names}
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, available_cores() // workers)
    return kept | {"OMP_NUM_THREADS": str(threads)}


def serve(connection: Connection, parent_alive: Connection, parent: int, device: str) -> None:
    """Answer requests until an empty one.

    Args:
        connection: Requests come in and answers go out here.
        parent_alive: A pipe whose other end only the parent holds, so it closes with the parent.
        parent: The parent's process id.
        device: The worker's device; see `Worker`.
    """
    for end in (connection, parent_alive):
        os.set_inheritable(end.fileno(), False)
    if sys.platform == "linux":
        import fcntl  # Windows has no fcntl, and doctor must still start there to report it

        # The kernel kills the process group when the pipe closes. This works even if the process
        # is stopped, or if C code holds the GIL so that no Python thread can check the pipe.
        fd = parent_alive.fileno()
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    Thread(target=_die_with_parent, args=(parent_alive, parent), daemon=True).start()
    # Python closes the connection before it runs the exit handlers of libraries. This duplicate
    # stays open until the process has ended, so the parent sees EOF only then.
    open_fds = [os.dup(connection.fileno())]

    def release() -> None:
        connection.close()
        while open_fds:  # a child of a child has nothing to close any more
            os.close(open_fds.pop())

    os.register_at_fork(after_in_child=release)
    try:
        while not connection.closed and _answer(connection, device):
            pass
    except (EOFError, OSError):
        if connection.closed:
            raise  # the function raised it, in a child that it forked
        os.killpg(0, signal.SIGKILL)  # the parent is gone


def _answer(connection: Connection, device: str) -> bool:
    """Run the next request and send its result or exception; return False if there is none.

    If the function forks, the connection is closed in the child. The child then ends when the
    function returns or raises there, and sends nothing.
    """
    packed = connection.recv_bytes()
    if packed == LEAVE:
        return False
    try:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)  # GPU arguments arrive on the current CUDA device
        run, func, args, kwargs = pickle.loads(packed)
        del packed  # it may be large
        _fill_main(func)
        result = run(device, func, args, kwargs)
        if connection.closed:
            return False
        answer = dumps("the result", (None, result), keep_device=True)
    except BaseException as error:
        if connection.closed:
            raise
        # By reference first, so that the parent gets its own class and its `except` matches.
        packed_error = pack_exception(error, (pickle.dumps, cloudpickle.dumps))
        answer = pickle.dumps((time.monotonic(), packed_error))
    connection.send_bytes(answer)
    return True


def _die_with_parent(parent_alive: Connection, parent: int) -> None:
    """Kill this process and its children when the parent is gone; a thread runs this."""
    # A process that the parent forked may keep the pipe open, so look at the parent's id too.
    while os.getppid() == parent and not parent_alive.poll(PARENT_CHECK):
        pass
    os.killpg(0, signal.SIGKILL)


def _fill_main(func: Any) -> None:
    """Copy a `__main__` function's globals into this `__main__`, where pickle looks up classes."""
    known = _globals_of(func)
    if known.get("__name__") == "__main__":
        # not __file__: with it, multiprocessing would run the caller's script again
        own = {name: value for name, value in known.items() if not name.startswith("__")}
        vars(sys.modules["__main__"]).update(own)


def _globals_of(func: Any) -> dict[str, Any]:
    """Return the globals of the function inside partials, decorators, methods and objects."""
    for inner in ("func", "__wrapped__", "__func__"):
        if hasattr(func, inner):
            return _globals_of(getattr(func, inner))
    code = func if hasattr(func, "__globals__") else type(func).__call__
    return getattr(code, "__globals__", {})
