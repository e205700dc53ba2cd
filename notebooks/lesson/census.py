"""How often each item was drawn in an epoch: once is right, everything else has a pattern."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

ONCE, OFTEN = "#a6cee3", "#fdbf6f"


def draw_census(counts: Mapping[str, Sequence[int]]) -> Figure:
    """Draw a row of boxes for each loader: the number of times that each item was drawn."""
    items = len(next(iter(counts.values())))
    figure, axes = plt.subplots(figsize=(7, 0.55 * len(counts) + 1))
    for row, drawn in enumerate(counts.values()):
        for item, count in enumerate(drawn):
            _box(axes, item, row, count)
    axes.set(xlim=(-0.5, items - 0.5), ylim=(len(counts) - 0.5, -0.5), xlabel="item")
    axes.set_xticks(range(items))
    axes.set_yticks(range(len(counts)), list(counts))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _box(axes: plt.Axes, item: int, row: int, count: int) -> None:
    """Draw one box: hatched unless `count` is 1."""
    color, hatch = (ONCE, None) if count == 1 else (OFTEN, "//")
    corner = (item - 0.45, row - 0.4)
    box = Rectangle(corner, 0.9, 0.8, facecolor=color, edgecolor="white", hatch=hatch)
    axes.add_patch(box)
    axes.text(item, row, str(count), ha="center", va="center", fontweight="bold")
