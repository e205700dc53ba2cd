"""How far the weights of the ranks are apart, drawn over the steps."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .palette import BROKEN, REFERENCE


def draw_drift(gaps: Mapping[str, Sequence[float]], title: str = "", first: int = 0) -> Figure:
    """Draw the gap after each step, for each way of training.

    A way that ends with a gap is broken, and has that colour.

    Args:
        gaps: The gaps by the name of the way.
        title: The title of the legend.
        first: The number of the first step. 0 means that the first gap is from before any step.
    """
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    styles = zip(("o", "s", "^", "D"), ("-", "--", "-.", ":"), strict=True)
    for (name, values), (marker, line) in zip(gaps.items(), styles, strict=False):
        steps = range(first, first + len(values))
        color = BROKEN if values[-1] > 0 else REFERENCE
        look: dict = {"color": color, "marker": marker, "linestyle": line, "markersize": 4}
        axes.plot(steps, values, label=name, **look)
    axes.set(xlabel="optimizer steps", ylabel="largest difference\nof a weight between ranks")
    axes.set_ylim(bottom=-0.01)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, title=title)
    return figure
