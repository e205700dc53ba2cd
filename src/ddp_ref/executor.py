"""Run a function on every GPU of this host at once: one process each, or by DataParallel."""

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from types import FunctionType
from typing import Any

import torch

from .environment import available_cores
from .pickling import dumps
from .worker import Worker, run_all, worker_environment

LEAVE = timedelta(seconds=10)  # for what the workers do at exit; then they are killed


class ParallelExecutor:
    """Call functions on all devices at once, one worker process a device; a context manager.

    The first `num_gpus` GPUs are used, all for None; ValueError where there are fewer. Without CUDA
    a warning says so, and `num_gpus` workers use the CPU (None: one a core, up to 2). Workers start
    with the first `run` and live until `close`. Calls from several threads take turns.
    """

    def __init__(self, num_gpus: int | None = None, pass_device: bool = True) -> None:
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
        """Call `func` once on each device, at the same time; return the results in device order.

        With `pass_device` it gets the keyword `device`, and `args` fill its other parameters:
        `run(f, data)` for `def f(device, data)`. A CUDA device is also the current one there.
        Results come back as they are: a tensor on the device it was on, but without its graph and
        `.grad`; views are copied.
        Raises the first exception in its own type, the device and its traceback as a note, and
        RuntimeError for a worker that died or in a forked process; calls that still run then are
        killed. TypeError where `func`, an argument or a result does not pickle.
        """
        if self._pass_device and "device" in kwargs:
            raise TypeError("device is passed by the executor: leave it out, or pass_device=False")
        if os.getpid() != self._owner:
            raise RuntimeError("this executor is of the process that forked this: make one here")
        packed = dumps("func or an argument", (_on_device, func, args, kwargs))
        with self._turn:
            workers = [self._worker(number) for number in range(len(self.devices))]
            return run_all(workers, lambda worker: worker.call(packed))

    def close(self) -> None:
        """End the workers, busy ones too; a later `run` starts new ones. A no-op if forked."""
        if os.getpid() != self._owner:
            return
        workers = list(self._workers.values())
        self._workers.clear()
        idle = [worker for worker in workers if worker.idle]
        with suppress(RuntimeError, TimeoutError):  # the results are here: no matter how they end
            run_all(idle, Worker.leave, LEAVE)
        for worker in workers:
            worker.end()

    def _worker(self, number: int) -> Worker:
        """Return the worker of a device: a new one for the first call, or after a death."""
        worker = self._workers.get(number)
        if worker is not None and worker.idle:
            return worker
        if worker is not None:
            worker.end()
        device = self.devices[number]
        name = f"the worker on {device}" if device.type == "cuda" else f"CPU worker {number}"
        environment = worker_environment(len(self.devices))
        self._workers[number] = Worker(
            name, environment, device=device, pass_device=self._pass_device
        )
        return self._workers[number]


def parallelize_on_gpus(
    num_gpus: int | None = None, pass_device: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., list[Any]]]:
    """Make a function run on all devices at once and return the list of their results.

    Each call starts the workers of a `ParallelExecutor(num_gpus, pass_device)` and ends them: a few
    seconds, which `ParallelExecutor` itself spends once for many calls. Raises as its `run`.
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
    """Make a function of batches run on a slice of them on each GPU; return the gathered result.

    `torch.nn.DataParallel` splits tensors along dimension 0, runs `func` in one thread a GPU, and
    gathers tensors on the first GPU. Without CUDA a warning says so, and `func` gets the whole
    batch.
    """

    @functools.wraps(func)
    def on_slices(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            warnings.warn(
                "no CUDA device is visible: the whole batch runs on the CPU", stacklevel=2
            )
            return func(*args, **kwargs)
        module = torch.nn.Module()
        module.forward = func
        return torch.nn.DataParallel(module)(*args, **kwargs)

    return on_slices


def _check(num_gpus: int | None) -> None:
    if num_gpus is not None and (type(num_gpus) is not int or num_gpus < 1):
        raise ValueError(f"num_gpus must be None or an integer of at least 1, not {num_gpus!r}")


def _devices(num_gpus: int | None) -> list[torch.device]:
    _check(num_gpus)
    gpus = torch.cuda.device_count()
    if gpus:
        if num_gpus is not None and num_gpus > gpus:
            raise ValueError(f"num_gpus={num_gpus}, but {gpus} CUDA devices are visible")
        return [torch.device("cuda", index) for index in range(num_gpus or gpus)]
    workers = num_gpus or min(2, available_cores())
    warnings.warn(f"no CUDA device is visible: {workers} CPU workers instead", stacklevel=3)
    return [torch.device("cpu")] * workers


def _on_device(
    func: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    device: torch.device,
    pass_device: bool,
) -> Any:
    """Call `func`, in the worker, with `device` where its parameter of that name stands."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not pass_device:
        return func(*args, **kwargs)
    names = _positional_names(func)
    if "device" in names and (place := names.index("device")) <= len(args):
        return func(*args[:place], device, *args[place:], **kwargs)
    return func(*args, device=device, **kwargs)


def _positional_names(func: Callable[..., Any]) -> Sequence[str]:
    if isinstance(func, FunctionType) and not vars(func):  # vars: __wrapped__ and __signature__
        return func.__code__.co_varnames[: func.__code__.co_argcount]  # at no cost, unlike the next
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # some builtins tell none
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]
