"""Time several ways of doing one thing side by side, and say how sure the ratios are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter

import numpy as np
import torch.distributed as dist

AGAIN = ", again"  # ends the name of the A/A control: the base once more, under another name
RESAMPLES = 10_000
CUT = 0.1  # of the rounds, at either end


@dataclass(frozen=True)
class Row:
    """How long one way takes, and its ratio to the base: above 1 is slower."""

    name: str
    seconds: float  # the median of the rounds
    ratio: float  # of its time to the base's in the same round: the middle of all rounds
    low: float  # the 95 % interval of `ratio`
    high: float

    def at_most(self, limit: float) -> bool | None:
        """Return whether the ratio is; None where the interval leaves it open."""
        return None if self.low <= limit < self.high else self.ratio <= limit


def timed(work: Callable[[], object], calls: int = 1) -> Callable[[], float]:
    """Return a way: what makes so many `calls` of `work` and returns the seconds of one."""

    def way() -> float:
        start = perf_counter()
        for _ in range(calls):
            work()
        return (perf_counter() - start) / calls

    return way


def together(way: Callable[[], float]) -> Callable[[], float]:
    """Return the way that begins on all ranks at once."""

    def after_barrier() -> float:
        dist.barrier()
        return way()

    return after_barrier


def side_by_side(
    ways: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each way, by round; a round takes all of them, in a random order.

    What disturbs the machine for longer than a round disturbs all ways alike. The order is the same
    on all ranks.
    """
    order = Random(0)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        for name in order.sample(list(ways), len(ways)):
            seconds = ways[name]()
            if number >= warm_up:
                times[name].append(seconds)
    return times


def compare(times: Mapping[str, list[float]], base: str, block: int = 1) -> list[Row]:
    """Return a row for each way, against `base`.

    So many rounds in a row are of one `block`: they share their luck, such as a place in memory.
    """
    bases = np.array(times[base])
    return [
        Row(name, float(np.median(own)), *middle(np.array(own) / bases, block))
        for name, own in times.items()
    ]


def middle(values: np.ndarray, block: int = 1) -> tuple[float, float, float]:
    """Return the middle of the rounds' `values`, and its 95 % interval (a bootstrap of blocks).

    It is the geometric mean without the lowest and the highest tenth: as little moved by a few slow
    rounds as the median, and surer of the same rounds.
    """
    from scipy.stats import trim_mean  # not above: mp.spawn's processes, which are timed, load this

    drawn = np.random.default_rng(0)
    blocks = np.log(values).reshape(-1, block)
    samples = drawn.choice(blocks, (RESAMPLES, len(blocks))).reshape(RESAMPLES, -1)
    middles = trim_mean(samples, CUT, axis=1)
    found = trim_mean(blocks, CUT, None), *np.percentile(middles, [2.5, 97.5])
    center, low, high = np.exp(found).tolist()
    return center, low, high


def find(rows: Sequence[Row], name: str) -> Row:
    """Return the row of that name."""
    (row,) = [row for row in rows if row.name == name]
    return row


def control(rows: Sequence[Row]) -> Row:
    """Return the row of the base's second measurement."""
    (row,) = [row for row in rows if row.name.endswith(AGAIN)]
    return row


def spread(rows: Sequence[Row]) -> float:
    """Return how far from 1 the control's interval reaches: what the machine's noise can do."""
    row = control(rows)
    return max(abs(row.low - 1), abs(row.high - 1))
