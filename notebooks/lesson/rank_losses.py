"""What each rank would log as its loss, and the loss of the job."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

COLORS = ["tab:blue", "tab:orange", "tab:green", "tab:red"]
LINES = ["-", "--", "-.", ":"]


def draw_rank_losses(local: Tensor, reduced: Tensor, first: int = 1) -> Figure:
    """Draw the losses of each rank, `local` (ranks, steps), thin and `reduced` (steps,) thick.

    `first` is the number of the first step.
    """
    figure, axes = plt.subplots(figsize=(7, 3.5))
    steps = range(first, first + len(reduced))
    for rank, losses in enumerate(local):
        color, line = COLORS[rank % 4], LINES[rank % 4]
        axes.plot(steps, losses, line, color=color, linewidth=1, label=f"rank {rank}, local")
    axes.plot(steps, reduced, color="black", linewidth=2.5, label="all ranks, reduced")
    axes.set(xlabel="optimizer step", ylabel="loss of the step's batch")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
