"""Two runs of one job, on top of each other."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .palette import REFERENCE


def draw_losses(losses: dict[str, Sequence[float]]) -> Figure:
    """Draw the training loss of each epoch of two runs: a wide line, and circles on it."""
    figure, panel = plt.subplots(figsize=(7, 2.8), layout="constrained")
    styles: list[dict] = [
        {"color": REFERENCE, "linewidth": 6, "alpha": 0.3},
        {"color": REFERENCE, "marker": "o", "markerfacecolor": "white", "linestyle": ":"},
    ]
    for (name, values), style in zip(losses.items(), styles, strict=True):
        panel.plot(range(1, len(values) + 1), values, label=name, **style)
    panel.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    return figure
