"""The exchange: the one place where ranks tell each other what they found, and so decide alike.

Between two exchanges a rank only adds to a small vector on its device, and waits for nobody.
"""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Value = float | Tensor  # a Python number or a tensor of one element


class Sums:
    """Sums over the samples of one rank, in float64 on its device: nothing waits for the device.

    They are of all that was added, never of the part since the last look, so that when the ranks
    look changes no bit of a mean.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        self.vector = torch.zeros(2 + len(self.names), dtype=torch.float64, device=device)

    def row(self, samples: int, values: Mapping[str, Value]) -> Tensor:
        """Return what to add for a batch of `samples`, of which `values` are the means."""
        device = self.vector.device
        means = torch.stack([_number(name, values[name], device) for name in self.names])
        # Not of the product with `samples`: the first value is the loss, the others are metrics.
        strange = (~torch.isfinite(means[:1])).double()
        count = torch.full_like(strange, samples)
        return torch.cat([count, strange, means * samples])

    def total(self, flags: Sequence[float], distributed: bool) -> "Total":
        """Return the sums and `flags` of all ranks, with one all-reduce (collective)."""
        told = torch.tensor(flags, dtype=torch.float64, device=self.vector.device)
        packed = torch.cat([self.vector, told])
        if distributed:
            dist.all_reduce(packed)
        samples, strange, *rest = packed.tolist()
        count = len(self.names)
        means = {
            name: value / samples if samples else float("nan")
            for name, value in zip(self.names, rest[:count], strict=True)
        }
        return Total(means, strange > 0, [flag > 0 for flag in rest[count:]])


def _number(name: str, value: Any, device: torch.device) -> Tensor:
    try:
        number = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
        return number.reshape(())
    except (TypeError, RuntimeError, ValueError) as error:
        what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} must be one number, a mean over samples, not {what}") from error


@dataclass(frozen=True)
class Total:
    """What the ranks know together: means over all samples, and which flags any of them raised."""

    means: dict[str, float]
    nonfinite: bool
    flags: list[bool]


@dataclass
class Requests:
    """What this rank has to say at the next exchange."""

    stop: bool = False
    error: Exception | None = None
    signals: list[int] = field(default_factory=list)

    def flags(self) -> list[float]:
        """Return the numbers that the ranks sum."""
        return [self.stop, bool(self.signals), self.error is not None]


@contextmanager
def caught_signals(into: list[int]) -> Iterator[None]:
    """Have SIGTERM and SIGUSR1 only append to `into`, in the block; a no-op in other threads.

    A collective in a signal handler would deadlock. When the block exits the process, the signals
    are ignored from then on: launchers repeat SIGTERM, and it must not cut the exit short. One
    that came too late for the block to answer is raised again behind it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: Any) -> None:
        into.append(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    after = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    except SystemExit:
        # Not a handler of ours: Python takes those back before it has ended.
        after = dict.fromkeys(numbers, signal.SIG_IGN)
        raise
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)
    for number in into:
        signal.raise_signal(number)
