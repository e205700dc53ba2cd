"""The losses of the ranks, step by step, beside the loss of one process with the whole batch."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def draw_against_big_batch(ranks: list[list[float]], whole: list[float]) -> Figure:
    """Draw each rank's loss, their mean, and the loss `whole` of one process, against the steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    reduced = [sum(losses) / len(losses) for losses in zip(*ranks, strict=True)]
    left.plot(reduced, "0.75", linewidth=5, label="reduced: the mean")
    for rank, (losses, line) in enumerate(zip(ranks, ("-", "--", ":", "-."), strict=False)):
        left.plot(losses, f"C{rank}{line}", linewidth=1, label=f"rank {rank}")
    right.plot(reduced, "0.75", linewidth=5, label=f"{len(ranks)} x B, reduced")
    right.plot(whole, "C1--", linewidth=1.4, label=f"1 x {len(ranks)}B, one process")
    left.set(xlabel="step", ylabel="training loss")
    right.set(xlabel="step")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure
