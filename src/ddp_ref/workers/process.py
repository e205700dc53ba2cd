"""Worker processes: how they are started, asked and ended, and the loop that each of them runs.

They are started by `subprocess`, not by `multiprocessing`. So the caller's script is not run again
and needs no `__main__` guard, the global start method stays unset, DataLoader workers start as they
do under torchrun, and a worker can be killed with everything it started. For Linux and macOS.
"""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import cloudpickle

from .._outcomes import add_note, describe, pack_exception, unpack_exception
from ..environment import RANK_NAMES, available_cores
from ..slurm import MASTER_NAMES
from .serialization import dumps, loads

LAUNCH_NAMES = {*RANK_NAMES, *MASTER_NAMES, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
LAUNCH_PREFIXES = ("SLURM_", "TORCHELASTIC_", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
LEAVE = b""  # the request that ends a worker
DIED = -math.inf  # the time of a worker's death, so that it sorts before all exceptions
SIMULTANEOUS = 0.25  # seconds to keep collecting failures: a later report may be the real cause
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


class Answer(NamedTuple):
    """What a function returned in a worker, or the error that it raised at the time `when`."""

    result: Any = None
    error: BaseException | None = None
    when: float = DIED  # by time.monotonic(), which is the same clock in all processes


class Worker:
    """A process in a session of its own that runs one function at a time.

    A thread of the parent does the blocking sends and receives. It gets EOF when the worker dies.
    """

    def __init__(self, name: str, env: dict[str, str], device: str, output: Any = None) -> None:
        """Start the process.

        Args:
            name: What error messages call the worker.
            env: Its environment variables.
            device: Where arguments on a GPU arrive ("cuda": on the worker's current GPU).
            output: A file for its output and errors (None: those of this process).
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
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._requests.put, None)  # the thread ends with this object
        Thread(target=_run_requests, args=(self._requests,), daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether an idle worker still waits for a request."""
        return not self._connection.poll()

    def submit(self, requests: Sequence[bytes], answers: "SimpleQueue[Any]") -> None:
        """Have the worker's thread put the worker and its answer into `answers`; see `run_all`."""
        self._requests.put(lambda: answers.put((self, self._ask(requests))))

    def _ask(self, requests: Sequence[bytes]) -> Answer:
        """Send requests, one after the other, and return the first result or error (blocking)."""
        answers = []
        for request in requests:
            answers.append(self._call(request))
            if answers[-1].error is not None:
                return answers[-1]
        return answers[0]

    def _call(self, request: bytes) -> Answer:
        try:
            try:
                self._connection.send_bytes(request)
                packed = self._connection.recv_bytes()
            except (EOFError, OSError):
                return self._end(request)
            raised_at, value = loads(packed)
        except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
            message = f"the result of {self.name} cannot be unpickled: {error!r}"
            return Answer(error=TypeError(message), when=time.monotonic())
        if raised_at is None:
            return Answer(value)
        failure = unpack_exception(value, self.name)
        if isinstance(failure, SystemExit):  # raised here, it would end this process as well
            left = RuntimeError(f"{self.name} exited with code {failure.code!r}, by sys.exit")
            left.__cause__ = failure
            failure = left
        return Answer(error=failure, when=raised_at)

    def _end(self, request: bytes) -> Answer:
        """Return how the process ended, after its connection has closed."""
        code = self.kill()  # a process that is already exiting keeps its exit code
        if code == 0 and request == LEAVE:
            return Answer()
        names = {-number.value: f"was killed by {number.name}" for number in signal.Signals}
        how = names.get(code, f"exited with code {code}")
        return Answer(error=RuntimeError(f"{self.name} {how}"))

    def kill(self) -> int:
        """Kill the process, if it still runs, and all that it started; return its exit code."""
        if self._process.returncode is None:  # else its number may belong to another process
            with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a zombie
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def _run_requests(requests: "SimpleQueue[Callable[[], None] | None]") -> None:
    while request := requests.get():
        request()
        del request  # it refers to the worker, and this thread must end when that is freed


def run_all(
    workers: Sequence[Worker], requests: Sequence[bytes], timeout: timedelta | None = None
) -> list[Any]:
    """Send requests to all workers at the same time and wait for the results.

    Workers that still run when another fails, the time is over or the caller is interrupted are
    killed.

    Args:
        workers: Idle workers.
        requests: What to send to each, one after the other: `(run, func, args, kwargs)` as `dumps`
            packs it, so that the worker calls `run(device, func, args, kwargs)`, or LEAVE.
        timeout: How long all of it may take (None: no limit).

    Returns:
        The results of the first request, in the order of the workers.

    Raises:
        BaseException: The error that came first. If a worker died, that is the RuntimeError which
            names it, with the exceptions of the others as notes: a rank may fail because its peer
            died, and report that before the death is noticed.
        TimeoutError: If workers have not answered in time. It names them.
    """
    deadline = time.monotonic() + (timeout.total_seconds() if timeout else math.inf)
    queue: SimpleQueue[tuple[Worker, Answer]] = SimpleQueue()
    answers: dict[Worker, Answer] = {}
    try:
        for worker in workers:
            worker.submit(requests, queue)
        while len(answers) < len(workers) and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                worker, answers[worker] = queue.get(timeout=min(left, WAKE))
                if answers[worker].error is not None:
                    deadline = min(deadline, time.monotonic() + SIMULTANEOUS)
    finally:
        late = [worker for worker in workers if worker not in answers]
        for worker in late:
            worker.kill()
    if any(answer.error is not None for answer in answers.values()):
        raise _earliest(answers)
    if late:
        names = ", ".join(worker.name for worker in late)
        raise TimeoutError(f"no result from {names} within {timeout}")
    return [answers[worker].result for worker in workers]


def _earliest(answers: dict[Worker, Answer]) -> BaseException:
    """Return the earliest error. If it is a worker's death, add the other errors as notes.

    This clears `answers`. Otherwise the error and the frame holding it would keep each other alive.
    """
    failures = [
        (answer.when, answer.error) for answer in answers.values() if answer.error is not None
    ]
    answers.clear()
    when, first = min(failures, key=lambda failure: failure[0])
    for later, error in failures:
        if when == DIED < later:
            add_note(first, f"also {describe(error)}")
    return first


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
        device: Where arguments on a GPU arrive ("cuda": on the current GPU).
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

    In a child that the function forked, the connection is closed, and the child ends as the
    function ends there.
    """
    packed = connection.recv_bytes()
    if packed == LEAVE:
        return False
    try:
        run, func, args, kwargs = loads(packed, device)
        del packed  # it may be large
        _fill_main(func)
        result = run(device, func, args, kwargs)
        if connection.closed:
            return False
        answer = dumps("the result", (None, result))
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
