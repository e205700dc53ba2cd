"""Runs that crashed and were restarted: read from what they print, drawn epoch by epoch."""

import re
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .palette import BROKEN, REFERENCE


def epochs_trained(text: str) -> list[int]:
    """Return the numbers of the epochs that a run printed, in its order and over all attempts."""
    return [int(number) for number in re.findall(r"epoch (\d+) \| loss", text)]


def draw_attempts(runs: Mapping[str, Sequence[int]], broken: str = "") -> Figure:
    """Draw, in a panel for each run, which epoch it had reached after how many epochs of training.

    The marker of an epoch that the run had to train again later is hollow. `broken` is the name of
    the run that has a mistake.
    """
    figure, panels = plt.subplots(
        1, len(runs), figsize=(8, 3), sharex=True, sharey=True, layout="constrained"
    )
    for panel, (name, reached) in zip(panels, runs.items(), strict=True):
        work = range(1, len(reached) + 1)
        lost = [epoch in reached[place:] for place, epoch in enumerate(reached, start=1)]
        color = BROKEN if name == broken else REFERENCE
        fills = ["white" if is_lost else color for is_lost in lost]
        panel.plot(work, reached, color=color, linewidth=1, zorder=1)
        panel.scatter(work, reached, c=fills, edgecolors=color, s=22, zorder=2)
        panel.set(title=name, yticks=range(0, 21, 5), xticks=range(0, 26, 5))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("epoch reached")
    panels[len(panels) // 2].set_xlabel("epochs trained, over all attempts")
    return figure
