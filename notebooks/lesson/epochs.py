"""The losses of two epochs in one picture, to see whether they go up and down alike."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from .palette import REFERENCE


def draw_two_epochs(runs: Mapping[str, Tensor]) -> Figure:
    """Draw the loss of each step in two epochs, (2, steps), with a panel for each run."""
    figure, panels = plt.subplots(
        1, len(runs), figsize=(8, 2.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (title, epochs) in zip(panels[0], runs.items(), strict=True):
        steps = range(1, epochs.shape[1] + 1)
        axes.plot(steps, epochs[0], "-", color=REFERENCE, label="one epoch")
        axes.plot(steps, epochs[1], "--", color=REFERENCE, label="the next epoch")
        axes.set_title(title, loc="left")
        axes.set(xlabel="step of the epoch", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("loss, mean of both ranks")
    panels[0][0].legend(frameon=False)
    return figure
