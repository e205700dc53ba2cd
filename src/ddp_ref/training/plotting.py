"""Figures of a run: its losses and metrics, epoch by epoch."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

History = Mapping[str, Sequence[float]]
PARTS = {"train": ("training", "#0072b2"), "val": ("validation", "#d55e00")}
WIDTH, HEIGHT = 6.4, 2.8  # inches per panel


def plot_losses(history: History, path: str | Path) -> None:
    """Plot the training and validation loss of each epoch; a dot marks the lowest validation loss.

    Args:
        history: The values of each epoch, by name, as in `Handler.history`.
        path: The file to write. Its suffix is the format.

    Raises:
        ValueError: If no epoch has ended yet, or matplotlib does not know the format.
        ImportError: If matplotlib is not installed.
    """
    figure = _figure(history, ["loss"])
    values = history.get("val_loss", [])
    numbers = [value for value in values if math.isfinite(value)]
    if numbers:
        lowest = min(numbers)
        epoch = values.index(lowest) + 1 + _epochs(history) - len(values)
        dot = {"marker": "o", "color": PARTS["val"][1], "linestyle": "none"}
        label = f"lowest: {lowest:.4g}, epoch {epoch}"
        figure.axes[0].plot(epoch, lowest, label=label, **dot)
        figure.axes[0].legend(frameon=False)
    _save(figure, path)


def plot_metrics(history: History, names: Sequence[str], path: str | Path) -> None:
    """Plot each metric in its own panel; arguments and errors are those of `plot_losses`."""
    if not names:
        raise ValueError("there are no metrics to plot: give Handler metrics={name: function}")
    _save(_figure(history, names), path)


def _figure(history: History, names: Sequence[str]) -> Any:
    if not _epochs(history):
        raise ValueError(
            "there is nothing to plot before the first epoch has ended: call train first"
        )
    figure = _new_figure(len(names))
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        _draw(axes, name, history)
    panels[-1].set_xlabel("epoch")
    return figure


def _new_figure(panels: int) -> Any:
    try:
        from matplotlib.figure import Figure  # not pyplot, which would keep every figure open
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(WIDTH, HEIGHT * panels), layout="constrained")


def _draw(axes: Any, name: str, history: History) -> None:
    last = _epochs(history)
    for part, (label, color) in PARTS.items():
        values = history.get(f"{part}_{name}", [])
        epochs = range(last - len(values) + 1, last + 1)  # a shorter list started later
        axes.plot(epochs, values, label=label, color=color, marker="." if last < 40 else "")
    axes.set_ylabel(name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def _epochs(history: History) -> int:
    return len(history.get("train_loss", []))


def _save(figure: Any, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
