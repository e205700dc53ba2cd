"""The exchange: the one place where ranks tell each other what they found, and so decide alike.

Between two exchanges a rank only adds to a small vector on its device, and waits for nobody. What
the ranks tell after a step travels during the next one, after which all of them hear it.
"""

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .initialize import side_group
from .outcomes import settle

Value = float | Tensor  # a Python number or a tensor of one element


class Sums:
    """Sums over the samples of one rank, in float64 on its device: nothing waits for the device.

    They are of all that was added, never of the part since the last look, so that when the ranks
    look changes no bit of a mean.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names, self.samples = list(names), 0
        self.device = device
        self.sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in names]

    def means(self, values: Mapping[str, Value]) -> list[Tensor]:
        """Return the means over a batch as `add` takes them: copies."""
        return [_number(name, values[name], self.device) for name in self.names]

    def add(self, samples: int, means: Sequence[Tensor]) -> None:
        """Add a batch of `samples`, of which these are the means."""
        self.samples += samples
        for total, mean in zip(self.sums, means, strict=True):
            total.add_(mean, alpha=samples)

    def state(self) -> Tensor:
        """Return all that was added, for a checkpoint."""
        samples = torch.tensor([self.samples], dtype=torch.float64)
        return torch.cat([samples, torch.stack(self.sums).cpu()])

    def add_state(self, state: Tensor) -> None:
        """Add what `state` has returned."""
        self.samples += int(state[0])
        for total, value in zip(self.sums, state[1:], strict=True):
            total += value.to(self.device)

    def total(self, distributed: bool) -> "Total":
        """Return the sums of all ranks, with one all-gather (collective)."""
        return self.begin_total(distributed, flags=())()

    def begin_total(self, distributed: bool, flags: Sequence[float]) -> Callable[[], "Total"]:
        """Begin to bring together the sums and `flags`; return what ends it (collective)."""
        heads = torch.tensor([self.samples, *flags], dtype=torch.float64)
        heads = heads.to(self.device, non_blocking=True)
        packed = torch.cat([heads, torch.stack(self.sums)])
        ranks_of = _begin_gather(packed) if distributed else lambda: [packed]
        return lambda: self._add_up(ranks_of())

    def _add_up(self, ranks: list[Tensor]) -> "Total":
        # As Python's numbers, in the order of the ranks, so that all find the same bits.
        numbers = [sum(column) for column in zip(*torch.stack(ranks).tolist(), strict=True)]
        first = len(numbers) - len(self.names)
        (samples, *said), sums = numbers[:first], numbers[first:]
        means = {
            name: value / samples if samples else math.nan
            for name, value in zip(self.names, sums, strict=True)
        }
        # The first is the loss, the others are metrics. What once was not finite stays so in a sum.
        return Total(means, not math.isfinite(sums[0]), *(flag > 0 for flag in said))


def _begin_gather(vector: Tensor) -> Callable[[], list[Tensor]]:
    """Return what waits for the ranks' vectors, in the order of the ranks (collective).

    Of a few numbers gloo's ring takes most of its time to go round: an all-gather does it once, an
    all-reduce twice.
    """
    vectors = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    work = dist.all_gather(vectors, vector, async_op=True)

    def gathered() -> list[Tensor]:
        work.wait()
        return vectors

    return gathered


def _number(name: str, value: Any, device: torch.device) -> Tensor:
    try:
        if not isinstance(value, Tensor):
            return torch.tensor(float(value), dtype=torch.float64, device=device)
        number = value.detach().to(device, torch.float64, copy=True)
        return number.reshape(()) if number.dim() else number
    except (TypeError, RuntimeError, ValueError) as error:
        what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} must be one number, a mean over samples, not {what}") from error


@dataclass(frozen=True)
class Total:
    """What the ranks know together: means over all samples, and what any of them has said."""

    means: dict[str, float]
    nonfinite: bool
    stop: bool = False
    signalled: bool = False
    failed: bool = False


@dataclass
class Requests:
    """What this rank has to say at the next exchange."""

    stop: bool = False
    error: Exception | None = None
    signals: list[int] = field(default_factory=list)

    def flags(self) -> list[float]:
        """Return the numbers that the ranks sum, in the order of Total."""
        return [self.stop, bool(self.signals), self.error is not None]


class Exchange:
    """One rank's part in the common decisions: what it asks for, and what all are told."""

    def __init__(self, distributed: bool) -> None:
        self.distributed, self.requests = distributed, Requests()
        self._final: BaseException | None = None
        self._told: Callable[[], Total] | None = None

    def call(self, callbacks: Iterable[Any], hook: str) -> None:
        """Call `hook` of each of `callbacks`; keep the first exception until the ranks meet."""
        for callback in callbacks:
            try:
                getattr(callback, hook)()
            except Exception as error:
                if error is self._final:
                    raise
                # The callbacks after it are called all the same: the other ranks' are, and one of
                # them may be collective.
                self.requests.error = self.requests.error or error

    def tell(self, sums: Sums) -> None:
        """Begin to tell the others what this rank has summed and has to say (collective)."""
        flags, self.requests.stop = self.requests.flags(), False
        self._told = sums.begin_total(self.distributed, flags)

    def hear(self) -> Total | None:
        """Return what the ranks have told, None where that was heard; raise a callback's error.

        Collective: all ranks call, and raise alike.
        """
        if self._told is None:
            return None
        told, self._told = self._told, None
        total = told()
        if total.failed:
            self._raise_failure()
        return total

    def _raise_failure(self) -> None:
        error, self.requests.error = self.requests.error, None
        with self.final():
            if group := side_group() if self.distributed else None:
                ranks = range(dist.get_world_size())
                settle(group, "the callbacks of Handler.train", ranks, error)
            elif error:
                raise error

    def raise_untold(self, end: BaseException) -> None:
        """Raise a callback's error that the ranks have not met to hear of; `end` came before.

        Where the callback was to make a collective call that the others wait in, none can follow.
        What has been told and not heard is forgotten: training may be begun again.
        """
        error, self.requests.error, self._told = self.requests.error, None, None
        if error is not None and isinstance(end, Exception):
            raise error from end

    @contextmanager
    def final(self) -> Iterator[None]:
        """Have what is raised in the block end this rank's training at once, also in a callback.

        All ranks raise it, or the others are in collectives of the block: no meeting can follow.
        """
        try:
            yield
        except BaseException as error:
            self._final = error
            raise


@contextmanager
def caught_signals(into: list[int]) -> Iterator[None]:
    """Have SIGTERM and SIGUSR1 only append to `into`, in the block; a no-op in other threads.

    A collective in a signal handler would deadlock. When the block exits the process, the signals
    are ignored from then on: launchers repeat SIGTERM, and it must not cut the exit short. One
    that came too late for the block to answer is raised again behind it, but not behind an
    exception, whose traceback it would cut short. Of the handlers from before only Python's are
    taken up again, not those in C, such as faulthandler's.
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
