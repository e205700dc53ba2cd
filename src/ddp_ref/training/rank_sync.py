"""How ranks share results and decide together: one small summary, reduced while training goes on.

Between two summaries a rank only adds to a small vector on its device, and waits for nobody. A
summary that starts after step k overlaps step k + 1 and is read when that step ends.
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

from ..decorators import on_rank

Value = float | Tensor  # a Python number or a tensor of one element


class Sums:
    """Sums over one rank's samples, in float64 on its device. Adding never waits for the device.

    The sums are cumulative: they are never reset when the ranks synchronize, so the sync interval
    cannot change a mean.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names, self.samples = list(names), 0
        self.device = device
        self.sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in names]

    def means(self, values: Mapping[str, Value]) -> list[Tensor]:
        """Return a batch's means in the form that `add` takes: float64 copies on the device."""
        return [_number(name, values[name], self.device) for name in self.names]

    def add(self, samples: int, means: Sequence[Tensor]) -> None:
        """Add a batch of `samples` samples with these means."""
        self.samples += samples
        for total, mean in zip(self.sums, means, strict=True):
            total.add_(mean, alpha=samples)

    def state(self) -> Tensor:
        """Return the number of samples and the sums as one CPU tensor, for a checkpoint."""
        samples = torch.tensor([self.samples], dtype=torch.float64)
        return torch.cat([samples, torch.stack(self.sums).cpu()])

    def add_state(self, state: Tensor) -> None:
        """Add the samples and sums that `state` returned."""
        self.samples += int(state[0])
        for total, value in zip(self.sums, state[1:], strict=True):
            total += value.to(self.device)

    def summary(self, distributed: bool) -> "GlobalSummary":
        """Return the summary over all ranks, with one all-gather (collective)."""
        return self.start_summary(distributed, flags=())()

    def start_summary(
        self, distributed: bool, flags: Sequence[float]
    ) -> Callable[[], "GlobalSummary"]:
        """Start to gather the sums and `flags` of all ranks (collective).

        Returns:
            A function that waits for the gather to finish and returns the summary.
        """
        heads = torch.tensor([self.samples, *flags], dtype=torch.float64)
        heads = heads.to(self.device, non_blocking=True)
        packed = torch.cat([heads, torch.stack(self.sums)])
        wait = _start_gather(packed) if distributed else lambda: [packed]
        return lambda: self._add_up(wait())

    def _add_up(self, ranks: list[Tensor]) -> "GlobalSummary":
        # Python adds the numbers in rank order, so every rank gets the same bits.
        numbers = [sum(column) for column in zip(*torch.stack(ranks).tolist(), strict=True)]
        first = len(numbers) - len(self.names)
        (samples, *flags), sums = numbers[:first], numbers[first:]
        means = {
            name: value / samples if samples else math.nan
            for name, value in zip(self.names, sums, strict=True)
        }
        # sums[0] is the loss; the rest are metrics. A sum that was non-finite once stays so.
        return GlobalSummary(means, not math.isfinite(sums[0]), *(flag > 0 for flag in flags))


def _start_gather(vector: Tensor) -> Callable[[], list[Tensor]]:
    """Start to gather `vector`; return a function that waits for all ranks' vectors (collective).

    A few numbers cost latency, not bandwidth: gloo's all-gather goes around its ring once, its
    all-reduce twice.
    """
    vectors = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    work = dist.all_gather(vectors, vector, async_op=True)

    def wait() -> list[Tensor]:
        work.wait()
        return vectors

    return wait


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
class GlobalSummary:
    """What all ranks know together: means over all samples, and whether any rank set a flag."""

    means: dict[str, float]
    nonfinite: bool
    stop: bool = False
    signalled: bool = False
    failed: bool = False


@dataclass
class LocalFlags:
    """What this rank reports in the next summary."""

    stop: bool = False
    error: Exception | None = None
    signals: list[int] = field(default_factory=list)

    def numbers(self) -> list[float]:
        """Return the flags as numbers to sum, in the order of GlobalSummary's fields."""
        return [self.stop, bool(self.signals), self.error is not None]


class RankSync:
    """One rank's part in the decisions that all ranks take together."""

    def __init__(self, distributed: bool) -> None:
        self.distributed, self.local = distributed, LocalFlags()
        self._fatal: BaseException | None = None
        self._pending: Callable[[], GlobalSummary] | None = None

    def call(self, callbacks: Iterable[Any], hook: str) -> None:
        """Call `hook` on each callback; keep the first exception until the ranks synchronize."""
        for callback in callbacks:
            try:
                getattr(callback, hook)()
            except Exception as error:
                if error is self._fatal:
                    raise
                # Later callbacks still run: they run on the other ranks too, and one of them may
                # make a collective call.
                self.local.error = self.local.error or error

    def start(self, sums: Sums) -> None:
        """Start to share this rank's sums and flags (collective)."""
        numbers, self.local.stop = self.local.numbers(), False
        self._pending = sums.start_summary(self.distributed, numbers)

    def finish(self) -> GlobalSummary | None:
        """Wait for the summary that `start` began (collective).

        Returns:
            The summary, or None if no summary is pending.

        Raises:
            Exception: On every rank, what a callback raised on any rank.
        """
        if self._pending is None:
            return None
        wait, self._pending = self._pending, None
        summary = wait()
        if summary.failed:
            self._raise_failure()
        return summary

    def _raise_failure(self) -> None:
        error, self.local.error = self.local.error, None
        with self.fatal_errors():
            if self.distributed:
                on_rank(range(dist.get_world_size()))(_raise)(error)
            else:
                _raise(error)

    def raise_unreported(self, cause: BaseException) -> None:
        """Raise a callback's error that no summary has reported yet; training ended by `cause`.

        If the callback failed before a collective call that the other ranks wait in, the ranks
        cannot synchronize any more. A pending summary is dropped, so that training can start again.
        """
        error, self.local.error, self._pending = self.local.error, None, None
        if error is not None and isinstance(cause, Exception):
            raise error from cause

    @contextmanager
    def fatal_errors(self) -> Iterator[None]:
        """Make an exception in the block end this rank's training at once, also in a callback.

        Either all ranks raise it, or the other ranks wait in a collective of the block: in both
        cases the ranks cannot synchronize any more.
        """
        try:
            yield
        except BaseException as error:
            self._fatal = error
            raise


@contextmanager
def caught_signals(into: list[int]) -> Iterator[None]:
    """Inside the block, SIGTERM and SIGUSR1 only append to `into`; a no-op in other threads.

    A collective in a signal handler would deadlock. If the block exits the process, both signals
    are ignored from then on: launchers repeat SIGTERM, and the repeat must not cut the exit short.
    A signal that came too late for the block to act on is raised again after the block, unless the
    block raised an exception, whose traceback it would cut short. Only handlers written in Python
    are restored, not those in C, such as faulthandler's.
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
        # SIG_IGN, not a handler of ours: Python removes its own handlers before it has exited.
        after = dict.fromkeys(numbers, signal.SIG_IGN)
        raise
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)
    for number in into:
        signal.raise_signal(number)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
