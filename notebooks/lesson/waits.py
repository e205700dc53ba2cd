"""How long each rank waits before an all-reduce, and how long the all-reduce itself takes."""

from collections.abc import Mapping, Sequence
from statistics import median

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .palette import COMMUNICATE, WAIT


def split_waits(
    ranks: Sequence[Sequence[tuple[Sequence[float], Sequence[float]]]], case: int
) -> list[tuple[float, float]]:
    """Return of each rank the median wait for the last rank, and the median time after that.

    Args:
        ranks: By rank and case, two lists with a time for each step, on the clock that the ranks
            share: when the rank called the all-reduce, and when it had the result.
        case: Which case to look at.

    Returns:
        By rank: seconds before the last rank came, seconds from then on.
    """
    arrived, left = zip(*(cases[case] for cases in ranks), strict=True)
    last = [max(step) for step in zip(*arrived, strict=True)]
    return [
        (
            median(end - begin for begin, end in zip(came, last, strict=True)),
            median(end - begin for begin, end in zip(last, went, strict=True)),
        )
        for came, went in zip(arrived, left, strict=True)
    ]


def draw_waits(cases: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Draw for each case a bar a rank: waiting for the last rank, then the all-reduce itself."""
    figure, axes = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
    names, waits, sends = [], [], []
    for title, ranks in cases.items():
        for rank, (wait, send) in enumerate(ranks):
            names.append(f"{title}: rank {rank}")
            waits.append(1e3 * wait)
            sends.append(1e3 * send)
    axes.barh(names, waits, color=WAIT, label="waits for the other rank")
    axes.barh(
        names, sends, left=waits, color=COMMUNICATE, hatch="//", ec="white", label="all-reduce"
    )
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds inside the collective (median)")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure
