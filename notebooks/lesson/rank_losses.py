"""The loss that each rank would log, the mean over the ranks, and the loss of one process."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .palette import RANKS, REFERENCE

LINES = ["-", "--", "-.", ":"]


def draw_rank_losses(local: Tensor, first: int = 1) -> Figure:
    """Draw the losses of each rank as thin lines, and their mean as a thick line.

    local: each rank's losses, (ranks, steps). first: the number of the first step.
    """
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    _plot_ranks(axes, local, first)
    axes.set(xlabel="optimizer step", ylabel="loss of the step's batch")
    axes.legend(frameon=False)
    return figure


def draw_against_big_batch(local: Tensor, whole: Tensor) -> Figure:
    """Draw the ranks' losses on the left, and on the right their mean and the loss of one process.

    local: each rank's losses, (ranks, steps). whole: the losses of one process, (steps,).
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    _plot_ranks(left, local, first=1)
    steps = range(1, len(whole) + 1)
    wide = {"color": REFERENCE, "alpha": 0.25, "linewidth": 5}
    right.plot(steps, local.mean(0), label="mean over the ranks", **wide)
    right.plot(steps, whole, "--", color=REFERENCE, label="one process")
    left.set(xlabel="optimizer step", ylabel="loss of the step's batch")
    right.set(xlabel="optimizer step")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _plot_ranks(axes: Axes, local: Tensor, first: int) -> None:
    steps = range(first, first + local.shape[1])
    for rank, losses in enumerate(local):
        color, line = RANKS[rank % 4], LINES[rank % 4]
        axes.plot(steps, losses, line, color=color, linewidth=1, label=f"rank {rank} alone")
    axes.plot(steps, local.mean(0), color=REFERENCE, linewidth=2.5, label="mean over the ranks")
    axes.spines[["top", "right"]].set_visible(False)
