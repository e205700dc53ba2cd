"""The gradients of one step: each rank's own, their mean, and the whole batch's."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from .palette import COMMUNICATE, RANKS, REFERENCE

MARKERS = "o^sD"  # by rank, for readers who cannot tell the colours apart


def draw_gradients(own: Sequence[Tensor], mean: Tensor, big: Tensor) -> Figure:
    """Draw the gradient of a small parameter: one marker per rank, their mean, the whole batch's.

    Args:
        own: Each rank's own gradient, flat, with one entry per tick.
        mean: The mean over the ranks, as an all-reduce made it.
        big: The gradient of the whole batch, from one process.
    """
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    entries = range(len(mean))
    axes.bar(
        entries, big, width=0.7, label="the whole batch's", facecolor="none", edgecolor=REFERENCE
    )
    for rank, (gradient, color, marker) in enumerate(zip(own, RANKS, MARKERS, strict=False)):
        axes.plot(entries, gradient, marker, color=color, markersize=6, label=f"rank {rank}'s own")
    axes.plot(entries, mean, "x", color=COMMUNICATE, markersize=9, mew=2, label="mean of the ranks")
    axes.axhline(0, color=REFERENCE, linewidth=0.8)
    axes.set(xlabel="output unit (the digit it stands for)", ylabel="gradient of its bias")
    axes.set_xticks(entries)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure
