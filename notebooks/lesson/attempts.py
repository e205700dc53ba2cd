"""Runs that were broken off and started again: read from what they print, drawn epoch by epoch."""

import re
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def epochs_trained(text: str) -> list[int]:
    """Return the numbers of the epochs that a run printed, in its order and over all attempts."""
    return [int(number) for number in re.findall(r"epoch (\d+) \| loss", text)]


def draw_attempts(runs: Mapping[str, Sequence[int]]) -> Figure:
    """Draw for each run the epoch that it had reached against the epochs that it had trained."""
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    styles = zip("os^", ("-", "--", ":"), strict=True)
    for (name, reached), (marker, line) in zip(runs.items(), styles, strict=True):
        work = range(1, len(reached) + 1)
        axes.plot(work, reached, marker=marker, linestyle=line, markersize=4, label=name)
    axes.set(xlabel="epochs trained, over all attempts", ylabel="epoch reached")
    axes.set_yticks(range(0, 21, 5))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    return figure
