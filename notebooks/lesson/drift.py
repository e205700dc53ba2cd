"""How far the ranks' replicas are apart, step by step."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

STYLES = [("tab:blue", "-"), ("tab:orange", "--"), ("tab:green", "-.")]


def draw_drift(distances: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw, for each name, the distance of the replicas after each step; `title` is the legend's.

    A distance is the largest difference between two ranks' values of one parameter.
    """
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for (name, values), (color, line) in zip(distances.items(), STYLES, strict=True):
        axes.plot(range(1, len(values) + 1), values, line, color=color, linewidth=2, label=name)
    axes.set(xlabel="optimizer step", ylabel="largest difference of a parameter")
    # Above: a line may be anywhere inside.
    axes.legend(
        frameon=False,
        title=title,
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=len(distances),
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure
