"""Trainings with several batch sizes: against what they read, and against what they did."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

STYLES = ("C0o-", "C1s-", "C2^-", "kx--")


def draw_batch_sizes(curves: dict[str, list[float]], samples: int, updates: dict) -> Figure:
    """Draw the loss after each epoch, at the left against samples, at the right against updates.

    curves: losses by name. samples: of one epoch. updates: optimizer steps of one epoch, by name.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    for (name, losses), style in zip(curves.items(), STYLES, strict=True):
        epochs = range(1, len(losses) + 1)
        size = 10 if style.startswith("k") else 5
        for axes, unit in ((left, samples), (right, updates[name])):
            axes.plot([n * unit for n in epochs], losses, style, label=name, markersize=size)
            axes.grid(alpha=0.3)
    left.set(xlabel="samples read by all ranks", ylabel="loss on the training set", ylim=(0, None))
    right.set(xlabel="updates of the weights")
    right.legend()
    figure.tight_layout()
    return figure
