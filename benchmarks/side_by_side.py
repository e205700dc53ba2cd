"""Time several variants of one thing side by side, and estimate how certain the ratios are.

In each benchmark, the first variant is the base, and the second is the base once more under another
name: the A/A control.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter

import numpy as np
import torch.distributed as dist

AGAIN = ", again"  # ends the name of the A/A control
Times = dict[str, list[float]]  # seconds of each variant, by round
RESAMPLES = 10_000
CUT = 0.1  # of the rounds, at either end


@dataclass(frozen=True)
class Row:
    """How long one variant takes, and its ratio to the base: above 1 is slower."""

    name: str
    seconds: float  # the median of the rounds
    ratio: float  # of its time to the base's in the same round: the middle of all rounds
    low: float  # the 95 % interval of `ratio`
    high: float

    def at_most(self, limit: float) -> bool | None:
        """Return whether the ratio is; None where the interval leaves it open."""
        return None if self.low <= limit < self.high else self.ratio <= limit


def timed(work: Callable[[], object], calls: int = 1) -> Callable[[], float]:
    """Return a function that calls `work` `calls` times and returns the seconds per call."""

    def variant() -> float:
        start = perf_counter()
        for _ in range(calls):
            work()
        return (perf_counter() - start) / calls

    return variant


def together(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that times one call of `work`, which all ranks begin at the same time."""

    def variant() -> float:
        dist.barrier()
        return timed(work)()

    return variant


def side_by_side(variants: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Return the seconds of each variant, by round; a round calls all of them, in a random order.

    A disturbance that lasts longer than a round slows all variants alike. The order is the same on
    all ranks. The first round is not counted.
    """
    order = Random(0)
    times: Times = {name: [] for name in variants}
    for _ in range(1 + rounds):
        for name in order.sample(list(variants), len(variants)):
            times[name].append(variants[name]())
    return {name: seconds[1:] for name, seconds in times.items()}


def compare(times: Times, block: int = 1) -> list[Row]:
    """Return a row for each variant, compared with the first.

    Every `block` consecutive rounds come from the same launch. They share effects such as the
    memory addresses that a process got.
    """
    base, *_ = map(np.array, times.values())
    return [
        Row(name, float(np.median(own)), *middle(np.array(own) / base, block))
        for name, own in times.items()
    ]


def middle(values: np.ndarray, block: int = 1) -> tuple[float, float, float]:
    """Return the middle of the rounds' `values`, and its 95 % interval (a bootstrap of blocks).

    It is the geometric mean without the lowest and the highest tenth: as robust as the median
    against a few slow rounds, but more precise.
    """
    from scipy.stats import trim_mean  # not above: mp.spawn's processes, which are timed, load this

    drawn = np.random.default_rng(0)
    blocks = np.log(values).reshape(-1, block)
    samples = drawn.choice(blocks, (RESAMPLES, len(blocks))).reshape(RESAMPLES, -1)
    middles = trim_mean(samples, CUT, axis=1)
    interval = np.percentile(middles, [2.5, 97.5])
    center, low, high = np.exp([trim_mean(blocks, CUT, None), *interval]).tolist()
    return center, low, high


def noise(rows: Sequence[Row]) -> float:
    """Return how far the control's interval extends from 1: the noise of the machine."""
    return max(abs(rows[1].low - 1), abs(rows[1].high - 1))
