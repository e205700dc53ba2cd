"""Training with several batch sizes, plotted against samples and against optimizer steps."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .palette import REFERENCE, VARIANTS

COLORS = [REFERENCE, *VARIANTS]
MARKERS = ["o-", "s-", "^-", "x--"]  # for readers who cannot tell the colours apart


def draw_batch_sizes(curves: dict[str, list[float]], samples: int, updates: dict) -> Figure:
    """Draw the loss after each epoch, against samples (left) and against optimizer steps (right).

    Args:
        curves: The losses by name; the first is the reference.
        samples: The samples of one epoch.
        updates: The optimizer steps of one epoch, by name.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    for (name, losses), color, marker in zip(curves.items(), COLORS, MARKERS, strict=True):
        epochs = range(1, len(losses) + 1)
        style = {"color": color, "markersize": 10 if "x" in marker else 5, "label": name}
        for axes, unit in ((left, samples), (right, updates[name])):
            axes.plot([n * unit for n in epochs], losses, marker, **style)
            axes.grid(alpha=0.3)
    left.set(xlabel="samples read by all ranks", ylabel="loss on the training set", ylim=(0, None))
    right.set(xlabel="optimizer steps")
    right.legend()
    figure.tight_layout()
    return figure
