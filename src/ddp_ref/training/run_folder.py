"""The folder of a run: its settings, its log, its history and its figures, epoch by epoch."""

import csv
import io
import json
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .callbacks import Callback

LOG_FORMAT = "[RANK {}] %(asctime)s %(levelname)s %(name)s: %(message)s"
SETTINGS = ("accumulate", "clip_norm", "precision", "on_nonfinite", "sync_every", "seed")
History = Mapping[str, Sequence[float]]
PARTS = {"train": ("training", "#0072b2"), "val": ("validation", "#d55e00")}
WIDTH, HEIGHT = 6.4, 2.8  # inches per panel


class RunFolder(Callback):
    """Write config.json, log.txt, history.csv, losses.png and metrics.png into `folder`, on rank 0.

    A resumed run appends to the log and replaces the other files. Without matplotlib there is one
    warning instead of the figures.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._formatter = logging.Formatter(LOG_FORMAT.format(0))

    def log(self, name: str, text: str) -> None:
        """Append a line to log.txt under the logger's `name`; warn if it cannot be written."""
        record = logging.makeLogRecord({"name": name, "levelname": "INFO", "msg": text})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
                file.write(self._formatter.format(record) + "\n")
        except OSError as error:
            warnings.warn(f"a line of log.txt is lost: {error}", stacklevel=2)

    def on_train_start(self) -> None:
        handler = self.handler
        loss_fn, scheduler = handler.loss_and_metrics.loss_fn, handler.scheduler
        settings = {
            **{name: repr(getattr(handler, name)).splitlines() for name in ("model", "optimizer")},
            "scheduler": None if scheduler is None else type(scheduler).__name__,
            "loss_fn": getattr(loss_fn, "__qualname__", repr(loss_fn)),
            "metrics": list(handler.metrics),
            **{name: getattr(handler, name) for name in SETTINGS},
            "batch_size": handler.train_loader.batch_size,
            "world_size": handler.info.world_size,
            "device": str(handler.device),
            "torch": torch.__version__,
        }
        replace_text(self.folder / "config.json", json.dumps(settings, indent=2) + "\n")

    def on_epoch_end(self) -> None:
        write_history(self.handler.history, self.folder / "history.csv")

    def on_train_end(self) -> None:
        handler = self.handler
        if not handler.train_losses:
            return
        try:
            plot(handler.history, ["loss"], self.folder / "losses.png")
            if handler.metrics:
                plot(handler.history, list(handler.metrics), self.folder / "metrics.png")
        except ImportError as error:
            warnings.warn(str(error), stacklevel=2)


def write_history(history: History, path: str | Path) -> None:
    """Write one row per epoch and one column per list of `history`; short lists start later."""
    last = max(map(len, history.values()), default=0)
    columns = [[""] * (last - len(values)) + [*values] for values in history.values()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["epoch", *history])
    writer.writerows(zip(range(1, last + 1), *columns, strict=True))
    replace_text(Path(path), text.getvalue())


def replace_text(path: Path, text: str) -> None:
    """Replace `path` by a file with `text` in one step: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def plot(history: History, names: Sequence[str], path: str | Path) -> None:
    """Plot each of `names` over the epochs, in its own panel.

    A dot marks the lowest validation loss.

    Args:
        history: The values of each epoch, by name, as in `Handler.history`.
        names: "loss" or metrics.
        path: The file to write. Its suffix is the format.

    Raises:
        ValueError: If no epoch has ended yet, or matplotlib does not know the format.
        ImportError: If matplotlib is not installed.
    """
    figure = _figure(history, names)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _figure(history: History, names: Sequence[str]) -> Any:
    if not names:
        raise ValueError("there are no metrics to plot: give Handler metrics={name: function}")
    if not (last := len(history.get("train_loss", []))):
        raise ValueError("nothing to plot before the first epoch has ended: call train first")
    try:
        from matplotlib.figure import Figure  # not pyplot, which would keep every figure open
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install matplotlib") from error
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
