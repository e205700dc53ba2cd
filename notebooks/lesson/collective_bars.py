"""The collectives of several training loops, beside each other."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .palette import COMMUNICATE


def draw_collectives(counts: dict[str, int], steps: int) -> Figure:
    """Draw how many collectives each loop took; `steps` of them are DDP's, for the gradients."""
    figure, panel = plt.subplots(figsize=(7, 2.2), layout="constrained")
    names = list(counts)
    rest = [count - steps for count in counts.values()]
    panel.barh(names, steps, color=COMMUNICATE, label="gradients, by DDP")
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": COMMUNICATE, "hatch": "///"}
    bars = panel.barh(names, rest, left=steps, label="everything else", **style)
    panel.bar_label(bars, [str(count) for count in counts.values()], padding=4)
    panel.set(xlabel=f"collectives in {steps} steps", xlim=(0, 1.15 * max(counts.values())))
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure
