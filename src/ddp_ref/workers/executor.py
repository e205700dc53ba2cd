"""Run a function on every GPU of this host at once, in processes or by DataParallel."""

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any

import torch

from ..environment import available_cores
from .process import LEAVE, Worker, run_all, worker_environment
from .serialization import dumps

LEAVE_TIME = timedelta(seconds=10)  # how long workers may take to exit before they are killed


class ParallelExecutor:
    """Call functions on all devices at once, with one worker process per device.

    Workers start with the first `run` and live until `close`, or until the `with` block ends. Calls
    from several threads take turns.
    """

    def __init__(self, num_gpus: int | None = None, pass_device: bool = True) -> None:
        """Choose the devices.

        Args:
            num_gpus: How many GPUs to use, counted from cuda:0 (None: all). Without CUDA it is the
                number of workers on the CPU (None: one per core, at most 2), and a warning says so.
            pass_device: Whether functions get the keyword `device`.

        Raises:
            ValueError: If `num_gpus` is not an integer of at least 1, or above the visible GPUs.
        """
        self.devices = _devices(num_gpus)
        self._pass_device = pass_device
        self._workers: dict[int, Worker] = {}
        self._owner = os.getpid()
        self._turn = Lock()

    def __enter__(self) -> "ParallelExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `func` once on each device, at the same time, and wait for the results.

        After an error, calls that still run are killed, and the next `run` starts new workers for
        them.

        Args:
            func: Any function, even a lambda, a closure or one defined in a notebook. With
                `pass_device` it gets its device as `device`, and the arguments fill its other
                parameters, so `run(f, data)` fits `def f(device, data)`. On a GPU, that device is
                also the worker's current CUDA device.
            *args: Its arguments. A tensor on any GPU arrives on the worker's own device.
            **kwargs: Its keyword arguments.

        Returns:
            What `func` returned, in device order. Tensors keep their device and lose their graph
            and `.grad`. A view comes back as a copy of the part that it shows.

        Raises:
            BaseException: The first exception of a worker, in its own type, with the device and
                its traceback as a note.
            RuntimeError: If a worker died: it names the device and the signal or exit code. Also
                in a forked process, which needs an executor of its own.
            TypeError: If `func`, an argument or a result cannot be pickled.
        """
        if self._pass_device and "device" in kwargs:
            raise TypeError("device is passed by the executor: drop it, or set pass_device=False")
        if os.getpid() != self._owner:
            raise RuntimeError("this executor belongs to the parent process: create one here")
        call = functools.partial(_on_device, self._pass_device), func, args, kwargs
        packed = dumps("func or an argument", call)
        with self._turn:
            workers = [self._worker(number) for number in range(len(self.devices))]
            return run_all(workers, packed)

    def close(self) -> None:
        """End the workers. Busy ones are killed. A later `run` starts new ones."""
        if os.getpid() != self._owner:
            return  # they work for the parent of this forked process
        workers, self._workers = list(self._workers.values()), {}
        if not self._turn.locked():  # else they are busy
            with suppress(RuntimeError, TimeoutError):  # how they end does not matter any more
                run_all([worker for worker in workers if worker.alive], LEAVE, LEAVE_TIME)
        for worker in workers:
            worker.kill()

    def _worker(self, number: int) -> Worker:
        """Return the worker of a device, a new one for the first call or after a death."""
        worker, device = self._workers.get(number), str(self.devices[number])
        if worker is not None:
            if worker.alive:
                return worker
            worker.kill()  # also kill the processes that it started
        environment = worker_environment(len(self.devices))
        self._workers[number] = Worker(f"worker {number} on {device}", environment, device)
        return self._workers[number]


def parallelize_on_gpus(
    num_gpus: int | None = None, pass_device: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., list[Any]]]:
    """Make a function run on all devices at once and return the list of its results.

    Each call starts the workers of a `ParallelExecutor` and ends them, which takes a few seconds.
    For many calls, use `ParallelExecutor` itself.

    Args:
        num_gpus: As for `ParallelExecutor`.
        pass_device: As for `ParallelExecutor`.

    Returns:
        The decorator. The decorated function raises what `ParallelExecutor.run` raises.

    Raises:
        ValueError: If `num_gpus` is neither None nor an integer of at least 1.
    """
    _check(num_gpus)

    def decorate(func: Callable[..., Any]) -> Callable[..., list[Any]]:
        @functools.wraps(func)
        def on_devices(*args: Any, **kwargs: Any) -> list[Any]:
            with ParallelExecutor(num_gpus, pass_device) as executor:
                return executor.run(func, *args, **kwargs)

        return on_devices

    return decorate


def parallel_on_all_devices(func: Callable[..., Any]) -> Callable[..., Any]:
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


def _devices(num_gpus: int | None) -> list[torch.device]:
    _check(num_gpus)
    gpus = torch.cuda.device_count()
    if gpus:
        if num_gpus is not None and num_gpus > gpus:
            raise ValueError(
                f"num_gpus={num_gpus}, but {gpus} CUDA devices are visible: pass at most {gpus}"
            )
        return [torch.device("cuda", index) for index in range(num_gpus or gpus)]
    workers = num_gpus or min(2, available_cores())
    warnings.warn(f"no CUDA device is visible: {workers} CPU workers instead", stacklevel=3)
    return [torch.device("cpu")] * workers


def _on_device(pass_device: bool, device: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` in the worker, and pass `device` in the position of that parameter."""
    if not pass_device:
        return func(*args, **kwargs)
    names = _positional_names(func)
    if "device" in names and (place := names.index("device")) <= len(args):
        return func(*args[:place], torch.device(device), *args[place:], **kwargs)
    return func(*args, device=torch.device(device), **kwargs)


def _positional_names(func: Callable[..., Any]) -> Sequence[str]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
