"""What a rank sends and how long it waits: a log of its calls of torch.distributed."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "reduce", "all_gather_object", "send", "isend", "recv", "barrier"),
)
Span = tuple[float, float]  # from when to when, in seconds


@dataclass
class Call:
    """A call that sends or receives. `size`: the bytes of its largest tensor."""

    name: str
    size: int
    start: float
    end: float = 0.0


@dataclass
class Log:
    """The calls, in the order of their starts, and when the rank waited for them."""

    calls: list[Call] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)


class _Work:
    """The result of an asynchronous call, which notes when the call ends and who waits for it."""

    def __init__(self, work: Any, call: Call, log: Log) -> None:
        self._work, self._call, self._log = work, call, log
        work.get_future().add_done_callback(lambda _: setattr(call, "end", time.perf_counter()))

    def wait(self) -> Any:
        start = time.perf_counter()
        done = self._work.wait()
        self._log.waits.append((start, time.perf_counter()))
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def recorded() -> Iterator[Log]:
    """Log the calls that this rank makes as `dist.all_reduce` and the like."""
    log = Log()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def logged(name: str) -> Callable[..., Any]:
        @functools.wraps(originals[name])
        def call(*args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            sizes = [value.nbytes for value in values if isinstance(value, torch.Tensor)]
            entry = Call(name, max(sizes, default=0), time.perf_counter())
            log.calls.append(entry)
            result = originals[name](*args, **kwargs)
            entry.end = time.perf_counter()
            if kwargs.get("async_op"):
                return _Work(result, entry, log)
            log.waits.append((entry.start, entry.end))
            return result

        return call

    for name in COLLECTIVES:
        setattr(dist, name, logged(name))
    try:
        yield log
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
