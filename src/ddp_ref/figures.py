"""Figures of a run's history, with matplotlib."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

History = Mapping[str, Sequence[float]]
PARTS = {"train": ("training", "#0072b2"), "val": ("validation", "#d55e00")}
WIDTH, HEIGHT = 6.4, 2.8  # inches per panel


def plot_losses(history: History, path: str | Path) -> None:
    """Plot the losses over the epochs. A dot marks the lowest validation loss.

    Args:
        history: The values of each epoch, by name, as in `Handler.history`.
        path: The file to write. Its suffix is the format.

    Raises:
        ValueError: If no epoch has ended yet, or matplotlib does not know the format.
        ImportError: If matplotlib is not installed.
    """
    plot_metrics(history, ["loss"], path)


def plot_metrics(history: History, names: Sequence[str], path: str | Path) -> None:
    """Plot each of `names` over the epochs, in its own panel, as `plot_losses` does.

    Args:
        history: The values of each epoch, by name, as in `Handler.history`.
        names: The metrics.
        path: The file to write. Its suffix is the format.
    """
    figure = _figure(history, names)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _figure(history: History, names: Sequence[str]) -> Any:
    if not names:
        raise ValueError("there are no metrics to plot: give Handler metrics={name: function}")
    if not (last := len(history.get("train_loss", []))):
        raise ValueError("nothing to plot before the first epoch has ended: call train first")
    from matplotlib.figure import Figure  # not pyplot, which would keep every figure open

    figure = Figure(figsize=(WIDTH, HEIGHT * len(names)), layout="constrained")
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        for part, (label, color) in PARTS.items():
            values = history.get(f"{part}_{name}", [])
            epochs = range(last - len(values) + 1, last + 1)  # a shorter list started later
            axes.plot(epochs, values, label=label, color=color, marker="." if last < 40 else "")
            if (part, name) == ("val", "loss") and (finite := list(filter(math.isfinite, values))):
                low = min(finite)
                epoch = epochs[list(values).index(low)]
                axes.plot(epoch, low, "o", label=f"lowest: {low:.4g}, epoch {epoch}", color=color)
        axes.set_ylabel(name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
    panels[-1].set_xlabel("epoch")
    return figure
