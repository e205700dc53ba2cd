"""The gradients of one step: each rank's own, their mean, and the big batch's."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor


def draw_gradients(own: Sequence[Tensor], mean: Tensor, big: Tensor) -> Figure:
    """Draw the entries of a small parameter's gradient: a marker a rank, the mean, the big batch's.

    Each tensor is flat, with one entry a tick.
    """
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    entries = range(len(mean))
    axes.bar(entries, big, width=0.7, color="0.85", edgecolor="0.5", label="the big batch's")
    for rank, (gradient, marker) in enumerate(zip(own, "o^sD", strict=False)):
        axes.plot(entries, gradient, marker, markersize=6, label=f"rank {rank}'s own")
    axes.plot(entries, mean, "kx", markersize=8, label="mean over the ranks")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="output unit (the digit it stands for)", ylabel="gradient of its bias")
    axes.set_xticks(entries)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure
