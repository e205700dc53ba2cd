"""How ranks share results and decide together: one small summary, reduced while training goes on.

Between two summaries a rank only adds to a few numbers on its device, and waits for nobody. A
summary that starts after step k overlaps step k + 1 and is read when that step ends.
"""

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import exchange_objects


class GlobalSummary(NamedTuple):
    """What all ranks know together: means over all samples, and whether any rank set a flag."""

    means: list[float]
    nonfinite: bool
    stop: bool
    signalled: bool


class RankSync:
    """Share the sums and flags of all ranks: `start` a summary, `finish` it later."""

    def __init__(self, device: torch.device, distributed: bool) -> None:
        self.device, self.distributed = device, distributed
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.reset()

    def reset(self) -> None:
        """Drop flags and a pending summary that an exception may have left behind."""
        self.stop = False  #: whether this rank asks all ranks to stop
        self.signals: list[int] = []  #: which signals this rank has received
        self._pending: tuple[Tensor, Any, Any] | None = None

    def start(self, count: float, totals: Tensor) -> None:
        """Start to share this rank's sums and flags; waits for nobody (collective).

        Args:
            count: The number of samples.
            totals: Sums over these samples, on the device: of the loss, then of the metrics.
        """
        numbers = (count, self.stop, bool(self.signals))
        self.stop = False
        # Filled on the GPU: copying them there would wait for it.
        own = torch.cat([*(totals.new_full((1,), number) for number in numbers), totals])
        flat, work = own, None
        if self.distributed:
            # A few numbers cost latency, not bandwidth: gloo's all-gather goes around its ring
            # once, its all-reduce twice.
            flat = own.new_empty(dist.get_world_size() * len(own))
            # PyTorch 2.13 has renamed it.
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            work = all_gather(flat, own, async_op=True)
        host, wait = self._to_host(own, flat.view(-1, len(own)), work)
        # No other tensor may get the memory of `own` and `flat` before the summary is read.
        self._pending = (host, wait, (own, flat))

    def finish(self) -> GlobalSummary | None:
        """Wait for the summary that `start` began; None if there is none."""
        if self._pending is None:
            return None
        (host, wait, _in_use), self._pending = self._pending, None
        wait()
        # Python adds the numbers in rank order, so every rank gets the same bits.
        count, stop, signalled, *sums = [sum(column) for column in zip(*host.tolist(), strict=True)]
        means = [total / count if count else math.nan for total in sums]
        # sums[0] is the loss; the rest are metrics. A sum that was non-finite once stays so.
        return GlobalSummary(means, not math.isfinite(sums[0]), stop > 0, signalled > 0)

    def _to_host(self, own: Tensor, ranks: Tensor, work: dist.Work | None) -> tuple[Tensor, Any]:
        """Return `ranks` on the CPU, and the function that waits until its values are there.

        On a GPU, a side stream waits and copies, so neither the training stream nor the host waits
        for the ranks before the function is called.
        """
        if self._side_stream is None:
            return ranks, work.wait if work else lambda: None
        self._side_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side_stream):
            if work:
                work.wait()
            host = ranks.to("cpu", non_blocking=True)  # into pinned memory, so without a wait
            copied = self._side_stream.record_event()
        for tensor in (own, ranks):  # `reset` may drop them before the side stream is done
            tensor.record_stream(self._side_stream)
        return host, copied.synchronize


class WindowCount:
    """The number of samples over which one optimizer step averages its gradient.

    DDP averages the ranks' gradients as if all ranks had the same count. If counts may differ, the
    ranks sum them while the forward pass runs, and each rank scales its loss so that DDP's average
    becomes the mean over all samples.
    """

    def __init__(
        self, counts: Sequence[float], device: torch.device, counts_may_differ: bool
    ) -> None:
        self.own, self._work = sum(counts), None
        if counts_may_differ:
            # torch.tensor would wait for the GPU.
            self._total = torch.full((), float(self.own), dtype=torch.float64, device=device)
            self._work = dist.all_reduce(self._total, async_op=True)

    def scale(self, loss: Tensor, count: float) -> Tensor:
        """Scale `loss`, a mean over `count` samples, so that DDP averages over all samples."""
        if self._work is None:
            share = count / self.own if self.own else 0.0
            return loss if share == 1 else loss * share
        self._work.wait()  # on a GPU the stream waits, not the host
        factor = count * (dist.get_world_size() / self._total)
        return loss * factor.nan_to_num(0.0).to(loss.dtype)  # 0 / 0: no rank has a sample


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

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    after = {n: signal.signal(n, lambda number, _: into.append(number)) for n in numbers}
    try:
        yield
    except SystemExit:
        # SIG_IGN, not a handler of ours: Python removes its own handlers before it has exited.
        after = dict.fromkeys(numbers, signal.SIG_IGN)
        raise
    finally:
        for number, handler in after.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: C code set it
    for number in into:
        signal.raise_signal(number)


def raise_on_all_ranks(problem: str, distributed: bool) -> None:
    """Raise ValueError on all ranks if any rank has a `problem` (collective if `distributed`).

    A rank that raised alone would leave the others waiting for it in their next collective.
    """
    for text in exchange_objects(problem) if distributed else [problem]:
        if text:
            raise ValueError(text)


def check_same(distributed: bool, **numbers: int | None) -> None:
    """Raise ValueError unless all ranks pass the same `numbers` (collective if `distributed`)."""
    every = exchange_objects(numbers) if distributed else [numbers]
    for what, number in numbers.items():
        if len(passed := {str(other[what]) for other in every}) > 1:
            raise ValueError(
                "all ranks must have the same data and settings, but this rank has "
                f"{number} {what} (all ranks: {' or '.join(sorted(passed))}): seed random data "
                "alike, and read only complete files"
            )
