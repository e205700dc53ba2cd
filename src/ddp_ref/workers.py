"""Run functions in other processes: on several ranks of this host, or on every device.

Each call starts new Python processes. They read the job (a function and its arguments) from a file,
and each writes its report (the result or the exception) to a file of its own. All of them have
ended when the call returns.

`subprocess` starts them, not `multiprocessing`. So the caller's script is not run again and needs
no `__main__` guard, the global start method stays unset, and a process can be killed with
everything that it started in its session. It works on Linux and macOS.

DataLoader workers start as they do under torchrun, with one difference: workers that are not forked
(on macOS, or with `multiprocessing_context="spawn"`) cannot find classes of the caller's
`__main__`. Put the data set into a module.
"""

import atexit
import functools
import inspect
import io
import math
import os
import pdb
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from types import FunctionType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from .decorators import describe, pack_exception, unpack_exception
from .initialize import cleanup_ddp
from .launch import available_cores, without_launch

Function = Callable[..., Any]

HOST = "127.0.0.1"
# A rank that loses its peer fails like this, or is aborted in C++ (SIGABRT). See `_doubt`.
LOST_PEER = re.compile("connection (was likely )?(closed|reset)|broken pipe", re.I)
# Seconds to keep collecting failures: a slow report may be about an earlier one.
FAILURE_WINDOW = 0.25
CAUSE_WINDOW = 10.0  # the same if there are only consequences: the rank with the cause may end late


def run_ranks(
    func: Function, /, *args: Any, nproc: int = 2, timeout: timedelta | None = None, **kwargs: Any
) -> list[Any]:
    """Run `func(*args, **kwargs)` on `nproc` new ranks of this host and wait for the results.

    Each rank is a process with torchrun's variables, so `initialize_ddp` and `env://` work in
    `func`. The ranks' output is printed when they have ended, in rank order. No rank is left
    running afterwards, even after an error or an interrupt.

    Args:
        func: Any function, even a lambda, a closure or one defined in a notebook.
        *args: Its arguments. A tensor on a GPU arrives on the rank's current GPU, cuda:0.
        nproc: How many ranks to start.
        timeout: How long the call may take, including starting and ending the ranks (None: no
            limit).
        **kwargs: Its keyword arguments.

    Returns:
        What `func` returned on each rank, in rank order. Tensors keep their device and lose their
        graph and `.grad`.

    Raises:
        BaseException: The first exception of a rank that is not the consequence of another rank's
            failure, in its own type, with the rank and its traceback as a note.
        RuntimeError: If a rank was killed or exited, even after `func` had returned. It names the
            rank and the signal or code.
        TimeoutError: If ranks have not ended in time. It names them.
        TypeError: If `func`, an argument or a result cannot be pickled, or if `timeout` is not a
            timedelta above 0.
        ValueError: If `nproc` is not an integer of at least 1.
    """
    if type(nproc) is not int or nproc < 1:
        raise ValueError(f"nproc must be an integer of at least 1, not {nproc!r}")
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise TypeError(f"timeout must be a timedelta above 0, such as one minute, not {timeout!r}")
    # This process hosts the store, on a free port, and the ranks join it as under torchrun. So
    # several runs at once do not clash.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    outputs = [io.BytesIO() for _ in range(nproc)]
    ranks = [
        Worker(f"rank {rank}", _rank_environment(rank, nproc, store.port), output=output)
        for rank, output in enumerate(outputs)
    ]
    try:
        return _run_all(ranks, (func, args, kwargs, False), timeout)
    finally:
        _print(outputs)


def _rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Return the variables of a rank under torchrun, and an encoding that `_print` reads."""
    variables = (
        f"RANK={rank} LOCAL_RANK={rank} GROUP_RANK=0 WORLD_SIZE={nproc} LOCAL_WORLD_SIZE={nproc} "
        f"GROUP_WORLD_SIZE=1 MASTER_ADDR={HOST} MASTER_PORT={port} TORCHELASTIC_RUN_ID=run_ranks "
        # So rank 0 connects to our store instead of hosting one.
        "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=0 PYTHONIOENCODING=utf-8"
    )
    return _environment(nproc) | dict(item.split("=") for item in variables.split())


def _print(outputs: list[io.BytesIO]) -> None:
    try:
        for rank, output in enumerate(outputs):
            output.seek(0)
            for line in output:
                text = line.decode(errors="replace").rstrip("\n")
                print(f"[rank {rank}] {text}", flush=True)
    except (OSError, ValueError) as error:  # a closed pipe must not cost the results
        warnings.warn(f"cannot print the output of the ranks: {error}", stacklevel=2)


class ParallelExecutor:
    """Call functions on all devices at once, each in a process of its own.

    Every call starts new processes and waits for their end. Starting Python and importing torch
    takes about 3 seconds (two devices on two cores), so put a lot of work into each call.
    """

    def __init__(self, num_gpus: int | None = None, pass_device: bool = True) -> None:
        """Choose the devices.

        Args:
            num_gpus: How many GPUs to use, counted from cuda:0 (None: all). Without CUDA it is the
                number of workers on the CPU (None: one per core, at most 2), and a warning says so.
            pass_device: Whether functions get the keyword `device`.

        Raises:
            ValueError: If `num_gpus` is not an integer, is below 1, or exceeds the visible GPUs.
        """
        _check(num_gpus)
        gpus = torch.cuda.device_count()
        if 0 < gpus < (num_gpus or 1):
            raise ValueError(f"num_gpus={num_gpus}, but {gpus} CUDA devices are visible: use fewer")
        self.devices = [torch.device("cuda", index) for index in range(gpus)[:num_gpus]]
        self._pass_device = pass_device
        if not gpus:
            workers = num_gpus or min(2, available_cores())
            self.devices = [torch.device("cpu")] * workers
            warnings.warn(f"no CUDA device is visible: {workers} CPU workers instead", stacklevel=2)

    def __enter__(self) -> "ParallelExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: all processes of a call have ended when it returns."""

    def run(self, func: Function, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `func` once on each device, at the same time, and wait for the results.

        After an error, calls that still run are killed.

        Args:
            func: Any function, even a lambda, a closure or one defined in a notebook. With
                `pass_device` it gets its device as `device`, and the arguments fill its other
                parameters, so `run(f, data)` fits `def f(device, data)`. On a GPU, that device is
                also the worker's current CUDA device.
            *args: Its arguments. A tensor on any GPU arrives on the worker's own device.
            **kwargs: Its keyword arguments.

        Returns:
            What `func` returned, in device order. Tensors keep their device and lose their graph
            and `.grad`.

        Raises:
            BaseException: The first exception of a worker, in its own type, with the device and
                its traceback as a note.
            RuntimeError: If a worker died: it names the device and the signal or exit code.
            TypeError: If `func`, an argument or a result cannot be pickled.
        """
        if self._pass_device and "device" in kwargs:
            raise TypeError("device is passed by the executor: drop it, or set pass_device=False")
        environment = _environment(len(self.devices))
        workers = [
            Worker(f"worker {number} on {device}", environment, str(device))
            for number, device in enumerate(self.devices)
        ]
        return _run_all(workers, (func, args, kwargs, self._pass_device), timeout=None)


def parallelize_on_gpus(
    num_gpus: int | None = None, pass_device: bool = True
) -> Callable[[Function], Callable[..., list[Any]]]:
    """Make a function run on all devices at once and return the list of its results.

    Every call starts a new process per device, which takes about 3 seconds (two devices on two
    cores), so put a lot of work into each call.

    Args:
        num_gpus: As for `ParallelExecutor`.
        pass_device: As for `ParallelExecutor`.

    Returns:
        The decorator. The decorated function raises what `ParallelExecutor.run` raises.

    Raises:
        ValueError: If `num_gpus` is neither None nor an integer of at least 1.
    """
    _check(num_gpus)

    def decorate(func: Function) -> Callable[..., list[Any]]:
        @functools.wraps(func)
        def on_devices(*args: Any, **kwargs: Any) -> list[Any]:
            return ParallelExecutor(num_gpus, pass_device).run(func, *args, **kwargs)

        return on_devices

    return decorate


def parallel_on_all_devices(func: Function) -> Function:
    """Make a function split its batch over the GPUs and return the gathered result.

    `torch.nn.DataParallel` splits tensors along dimension 0, calls `func` in one thread per GPU and
    gathers the results on the first GPU. Without CUDA a warning says so, and `func` gets the whole
    batch.

    Args:
        func: A function of tensors with the same size in dimension 0.

    Returns:
        The function with its batches split.
    """

    @functools.wraps(func)
    def on_slices(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available():
            module: Any = func
            if not isinstance(func, torch.nn.Module):
                module = torch.nn.Module()
                module.forward = func
            return torch.nn.DataParallel(module)(*args, **kwargs)
        warnings.warn("no CUDA device is visible: the whole batch runs on the CPU", stacklevel=2)
        return func(*args, **kwargs)

    return on_slices


def _check(num_gpus: int | None) -> None:
    if num_gpus is not None and (type(num_gpus) is not int or num_gpus < 1):
        raise ValueError(f"num_gpus must be None or an integer of at least 1, not {num_gpus!r}")


def _environment(workers: int) -> dict[str, str]:
    """Return the environment of one of `workers` processes.

    It is this process's, without launchers' variables. Each process
    gets its share of the cores, unless OMP_NUM_THREADS is set.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, available_cores() // workers)
    return without_launch(os.environ) | {"OMP_NUM_THREADS": str(threads)}


@dataclass
class Worker:
    """A process that does the job and writes a report: the result or the exception."""

    name: str
    environment: dict[str, str]
    device: str = ""  # "": func chooses one
    output: io.BytesIO | None = None  # collects stdout and stderr; None: they go where ours go
    result: Any = None

    def start(self, report: Path) -> None:
        """Start the process, in a session of its own. It runs `_serve`."""
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores all others
        own = (str(report), os.getpid(), self.device)
        boot = (
            f"import sys; sys.path, sys.argv[0] = {path}, {str(sys.argv[0])!r}; "
            f"from {__name__} import _serve; _serve{own}"
        )
        self.report = report
        # A pipe and not a file: `echo > /dev/stderr` in a rank would empty the file.
        captured = subprocess.PIPE if self.output else None
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", boot, *sys.argv[1:]],
            env=self.environment,
            stdin=subprocess.PIPE,  # see _die_with_parent
            stdout=captured,
            stderr=captured and subprocess.STDOUT,
            start_new_session=True,
        )

    def read_output(self) -> None:
        """Read what the process has written so far."""
        if self.process.stdout and self.output:
            os.set_blocking(self.process.stdout.fileno(), False)
            self.output.write(self.process.stdout.read() or b"")

    def kill(self) -> int:
        """Kill the process, if it still runs, and what it has started; return its exit code.

        Call it once: later, its number may belong to another process.
        """
        with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a zombie
            os.killpg(self.process.pid, signal.SIGKILL)
        with self.process:  # it closes the pipes
            code = self.process.wait()
            self.read_output()
        return code

    def end(self, seen_alive: float) -> tuple[float, BaseException] | None:
        """Take the result of the ended process, or return when and how it failed.

        Args:
            seen_alive: When it was last seen alive: the time of a failure that it did not report.
        """
        code = self.kill()
        names = {-number.value: f"was killed by {number.name}" for number in signal.Signals}
        how = names.get(code, f"exited with code {code}")
        if self.report.exists():
            failed_at, self.result = torch.load(self.report, weights_only=False)
            if failed_at is not None:
                return failed_at, unpack_exception(self.result, self.name)
            if code == 0:
                return None
            how += " after func had returned"
        hint = "did it run out of memory?" if code == -signal.SIGKILL else "look at its output"
        return seen_alive, RuntimeError(f"{self.name} {how}: {hint}")


def _run_all(workers: list[Worker], job: Any, timeout: timedelta | None) -> list[Any]:
    """Start all workers and return their results, in order, when all have ended.

    If a worker fails, the time is up or the caller is interrupted, those that still run are killed.

    Args:
        workers: The workers, which have not started yet.
        job: `(func, args, kwargs, pass_device)`.
        timeout: How long all of it may take (None: no limit).

    Raises:
        BaseException: The first failure that is not the consequence of another one; if a worker
            died, a RuntimeError that names it.
        TimeoutError: If workers have not ended in time. It names them.
    """
    deadline = time.monotonic() + (timeout.total_seconds() if timeout else math.inf)
    # In a worker, cloudpickle gives all functions of `__main__` one dict as their globals. This
    # empty function is how the worker gets at it.
    of_main = FunctionType((lambda: None).__code__, vars(sys.modules["__main__"]))
    packed = _dumps("func or an argument", (*job, of_main))
    running, failures = [], []
    with TemporaryDirectory() as folder:
        job_file = Path(folder, "job")
        job_file.write_bytes(packed)
        try:
            for worker in workers:
                # Each worker deletes its link, so nothing stays if this process is killed later.
                Path(folder, f"{worker.name}.job").hardlink_to(job_file)
                worker.start(Path(folder, worker.name))
                running.append(worker)
            job_file.unlink()
            while running and (seen_alive := time.monotonic()) < deadline:
                time.sleep(0.02)
                for worker in running:
                    worker.read_output()
                for worker in [worker for worker in running if worker.process.poll() is not None]:
                    running.remove(worker)
                    if failure := worker.end(seen_alive):
                        doubt = _doubt(failure[1])
                        failures.append((doubt, *failure))
                        window = CAUSE_WINDOW if doubt else FAILURE_WINDOW
                        deadline = min(deadline, time.monotonic() + window)
        finally:
            for worker in running:
                worker.kill()
    if failures:
        raise min(failures, key=lambda failure: failure[:2])[-1]
    if running:
        late = ", ".join(worker.name for worker in running)
        advice = "look for a skipped collective or a running thread, or pass a longer timeout"
        raise TimeoutError(f"{late} did not end within {timeout}: {advice}")
    return [worker.result for worker in workers]


def _doubt(failure: BaseException) -> int:
    """Return how likely another rank caused this failure: 0 is the least, and raised first.

    An abort comes before a lost connection: the process that aborts closes its connections.
    """
    text = describe(failure)
    return 2 if LOST_PEER.search(text) else int("SIGABRT" in text)


def _serve(report: str, parent: int, device: str) -> None:
    """Do the job and write the report, in the new process.

    Args:
        report: The path of this worker's report; with ".job" behind it, that of the job.
        parent: The parent's process id.
        device: This worker's device, or "".
    """
    _die_with_parent(parent)
    atexit.register(cleanup_ddp)  # it closes a group that func leaves open
    pdb.set_trace = dist.breakpoint = _refuse_breakpoint  # breakpoint() calls pdb.set_trace
    pid = os.getpid()

    def write(packed: bytes) -> None:
        if os.getpid() == pid:  # not in a child that func forked and that also got here
            Path(report + ".part").write_bytes(packed)
            Path(report + ".part").rename(report)  # so the report is complete if it exists

    try:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        job = report + ".job"
        func, args, kwargs, pass_device, of_main = torch.load(job, _to_own_gpu, weights_only=False)
        Path(job).unlink()
        # Pickle looks for the caller's classes in `__main__`. Not __file__: with it,
        # multiprocessing would run the caller's script again.
        own = {n: v for n, v in of_main.__globals__.items() if not n.startswith("__")}
        vars(sys.modules["__main__"]).update(own)
        if pass_device:
            first = ""
            with suppress(ValueError):  # a builtin has no signature
                first = next(iter(inspect.signature(func).parameters), "")
            if args and first == "device":
                args = (torch.device(device), *args)
            else:
                kwargs["device"] = torch.device(device)
        write(_dumps("the result", (None, func(*args, **kwargs))))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        failed_at = time.monotonic()
        if isinstance(error, SystemExit):  # it would end the parent, too
            message = f"sys.exit({error.code!r}) was called: return or raise instead"
            error, error.__cause__ = RuntimeError(message), error
        # cloudpickle knows the classes that the parent sent, so the parent's `except` matches.
        exception = pack_exception(error, cloudpickle.dumps)
        write(_dumps("the exception", (failed_at, exception)))
        os._exit(0)  # a normal exit might wait: for a thread, or for peers that wait for this rank


def _die_with_parent(parent: int) -> None:
    """Let this process and its children be killed when the parent is gone.

    stdin is a pipe to which the parent never writes. It moves to another descriptor, which closes
    when the parent dies.
    """
    parent_alive = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # with the pipe, input() would wait
    if sys.platform == "linux":
        import fcntl  # here, because Windows has none and must be able to import this module

        # The kernel kills the process group when the pipe closes. This works even if the process
        # is stopped, or if C code holds the GIL so that no Python thread can check anything.
        fcntl.fcntl(parent_alive, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(parent_alive, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent_alive, fcntl.F_SETFL, os.O_ASYNC)

    def watch() -> None:  # for macOS, or if a process that the parent forked keeps the pipe open
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    Thread(target=watch, daemon=True).start()


def _refuse_breakpoint(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "breakpoint() needs a terminal, and this process has none: call the function in a script, "
        "start it with torchrun --nproc-per-node=2, and let only one rank reach breakpoint()"
    )


def _to_own_gpu(storage: Any, location: str) -> Any:
    """Move an argument from any GPU to the current one."""
    return storage.cuda() if location.startswith("cuda") else None


def _dumps(what: str, value: Any) -> bytes:
    """Return `value` as bytes: functions by cloudpickle, tensors by torch.

    Args:
        what: What the value is, for the error message.
        value: Anything that cloudpickle can pickle.

    Raises:
        TypeError: If the value cannot be pickled.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file, pickle_module=cloudpickle, pickle_protocol=5)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}; use plain data or tensors") from error
    return file.getvalue()
