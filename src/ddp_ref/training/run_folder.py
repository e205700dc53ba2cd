"""The folder of a run: its settings, its log, its history and its figures."""

import csv
import io
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from .callbacks import Callback

LOG_FORMAT = "[RANK {}] %(asctime)s %(levelname)s %(name)s: %(message)s"
SHOWN = ("accumulate", "clip_norm", "precision", "on_nonfinite", "sync_every", "seed")
History = Mapping[str, Sequence[float]]


class RunFolder(Callback):
    """Write config.json, log.txt, history.csv, losses.png and metrics.png into `folder`.

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
        if handler.rank:
            return
        loss_fn, scheduler = handler.loop.task.loss_fn, handler.scheduler
        settings = {
            **{name: repr(getattr(handler, name)).splitlines() for name in ("model", "optimizer")},
            "scheduler": None if scheduler is None else type(scheduler).__name__,
            "loss_fn": getattr(loss_fn, "__qualname__", repr(loss_fn)),
            "metrics": list(handler.metrics),
            **{name: getattr(handler, name) for name in SHOWN},
            "batch_size": getattr(handler.train_loader, "batch_size", None),
            "world_size": handler.info.world_size,
            "device": str(handler.device),
            "torch": torch.__version__,
        }
        replace_text(
            self.folder / "config.json", json.dumps(settings, indent=2, default=str) + "\n"
        )

    def on_epoch_end(self) -> None:
        if self.handler.rank == 0:
            write_history(self.handler.history, self.folder / "history.csv")

    def on_train_end(self) -> None:
        handler = self.handler
        if not handler.train_losses:
            return
        try:
            handler.plot_losses(self.folder / "losses.png")
            if handler.metrics:
                handler.plot_metrics(self.folder / "metrics.png")
        except ImportError as error:
            if handler.rank == 0:
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
