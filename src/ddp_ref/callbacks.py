"""Callbacks: hooks around training, which every rank calls in the same order."""

import csv
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint import NAME, numbered, step_of
from .collectives import exchange_objects
from .settings import check_count

if TYPE_CHECKING:
    from .handler import Handler


class Callback:
    """Take part in `Handler.train`: subclass this and override the hooks you need.

    Every rank calls every hook, in the order of the handler's list, with each Checkpoint after all
    others. So a hook may make collective calls if all ranks make them. If a hook raises an
    exception, its process ends at once with its own traceback, and the launcher or the closed
    connection ends the other ranks. A signal never interrupts a hook: training ends later, between
    two steps or two batches of validation.
    """

    handler: "Handler"  # set by the Handler that gets this callback
    #: the names that it adds to `handler.history`, so that others may monitor them
    records: Sequence[str] = ()

    def on_train_start(self) -> None:
        """Called when `train` starts, before its first epoch."""

    def on_epoch_start(self) -> None:
        """Called before the first batch of an epoch, and again if the epoch is resumed.

        The model is in train mode. What the hook changes, such as `layer.eval()`, stays. It must
        not freeze or unfreeze parameters, which DDP would not notice: `Handler` raises an error.
        """

    def on_step_end(self) -> None:
        """Called after each optimizer step; `handler.step` counts it."""

    def on_validation_start(self) -> None:
        """Called after the last step of each epoch, also if there is no validation.

        If a signal ends the validation, a checkpoint has what this hook has changed, and the
        resumed run calls it again.
        """

    def on_epoch_end(self) -> None:
        """Called after validation; the history and `handler.epoch` already include this epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch; not after an exception or a signal."""


class EarlyStopping(Callback):
    """Stop when `monitor` has not improved by more than `min_delta` for `patience` epochs.

    It reads only the history, so it continues to count in a resumed run.

    Args:
        monitor: The name of a list in `handler.history`, such as "val_loss".
        patience: Epochs to wait for an improvement. Epochs with the value NaN do not count.
        min_delta: Only a change larger than this counts as an improvement.
        mode: "min" if lower values are better, "max" if higher ones are.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self, monitor: str = "val_loss", patience: int = 5, min_delta: float = 0, mode: str = "min"
    ) -> None:
        _check_mode(mode)
        check_count("patience", patience)
        if not min_delta >= 0:
            raise ValueError(f"min_delta must be at least 0, not {min_delta!r}")
        self.monitor, self.patience, self.min_delta, self.mode = monitor, patience, min_delta, mode

    def on_train_start(self) -> None:
        if self.handler.history.get(self.monitor):  # the run that saved may have stopped early
            self.on_epoch_end()

    def on_epoch_end(self) -> None:
        values = self.handler.history.get(self.monitor, [])
        if (waited := _epochs_since_best(values, self.min_delta, self.mode)) >= self.patience:
            self.handler.log(f"{self.monitor} has not improved for {waited} epochs: stopping")
            self.handler.stop()


class LearningRateMonitor(Callback):
    """Record the learning rate at the start of each epoch in `handler.history["lr"]`.

    "lr" is the first parameter group's; other groups are "lr_1", "lr_2" and so on. Epochs that
    ended before the handler had this callback get NaN.
    """

    def on_epoch_start(self) -> None:
        for number, group in enumerate(self.handler.optimizer.param_groups):
            rates = self.handler.history.setdefault(f"lr_{number}" if number else "lr", [])
            rates += [math.nan] * (self.handler.epoch - len(rates))
            if len(rates) == self.handler.epoch:  # a resumed epoch has its value already
                rates.append(float(group["lr"]))


class Checkpoint(Callback):
    """Save checkpoints into `folder` during training, and once more at the end.

    Rank 0 writes the files, which are named by the optimizer step: step_000000120.pt. `Handler`
    also saves here when a signal ends training (if there are several, in the last one's folder).
    `Handler.load(folder)` loads the newest file.

    Args:
        folder: Where to save.
        every_epochs: Epochs between two saves; None for never.
        every_steps: Optimizer steps between two saves; None for never.
        keep: How many of the newest files to keep.
        monitor: The name of a list in `handler.history`. If given, best.pt is the checkpoint of
            the epoch with the best value so far.
        mode: "min" if lower values are better, "max" if higher ones are, such as an accuracy.

    Raises:
        ValueError: If a number is not an integer of at least 1, or the mode is unknown.
    """

    def __init__(
        self,
        folder: str | Path,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        keep: int = 3,
        monitor: str | None = None,
        mode: str = "min",
    ) -> None:
        _check_mode(mode)
        numbers = {"every_epochs": every_epochs, "every_steps": every_steps, "keep": keep}
        for name, number in numbers.items():
            if number is not None or name == "keep":
                check_count(name, number)
        self.folder, self.monitor, self.mode = Path(folder), monitor, mode
        self.every_epochs, self.every_steps, self.keep = every_epochs, every_steps, keep

    def on_train_start(self) -> None:
        self._saved = self.handler.step, self.handler.epoch
        self._known = len(self.handler.history.get(self.monitor or "", []))
        if self.handler.rank == 0:
            for left_over in self.folder.glob(".*.pt.tmp"):  # of a killed save
                left_over.unlink(missing_ok=True)
            if later := [p for p in numbered(self.folder) if step_of(p) > self.handler.step]:
                warnings.warn(
                    f"{later[-1]} is from a later step than this run's {self.handler.step}: move "
                    "it away, or call handler.load(folder) before train to resume from it",
                    stacklevel=2,
                )

    def on_step_end(self) -> None:
        if self.every_steps and self.handler.step % self.every_steps == 0:
            self._save()

    def on_epoch_end(self) -> None:
        # best.pt comes before the step's file: a run that dies between the two repeats both.
        if self.monitor and self._is_best(self.monitor):
            self.handler.save(self.folder / "best.pt")
        if self.every_epochs and self.handler.epoch % self.every_epochs == 0:
            self._save()

    def _is_best(self, monitor: str) -> bool:
        """Say whether the epoch has added the best value so far; all ranks must have the same."""
        values = self.handler.history.get(monitor, [])
        new, self._known = values[self._known :], len(values)
        found = exchange_objects(repr(new)) if self.handler.distributed else []
        if len({*found}) > 1:
            raise ValueError(
                f"{monitor} differs between ranks, {found}: append the same number on all of them"
            )
        best = _epochs_since_best(values, 0.0, self.mode) == 0
        return bool(new) and math.isfinite(new[-1]) and best

    def on_train_end(self) -> None:
        if self._saved != (self.handler.step, self.handler.epoch):
            self._save()

    def _save(self) -> None:
        self._saved = self.handler.step, self.handler.epoch
        path = self.folder / NAME.format(self.handler.step)
        self.handler.save(path)
        self.handler.log(f"saved {path}")
        if self.handler.rank == 0:
            # Files of later steps belong to another run: they do not count for `keep`.
            ours = [path for path in numbered(self.folder) if step_of(path) <= self.handler.step]
            for path in ours[: -self.keep]:
                path.unlink(missing_ok=True)


class HistoryFile(Callback):
    """Write history.csv after each epoch: a row per epoch and a column per list of the history."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "history.csv"

    def on_epoch_end(self) -> None:
        if self.handler.rank:
            return
        history = self.handler.history
        last = max(map(len, history.values()))
        # A short list began late.
        columns = [[""] * (last - len(values)) + [*values] for values in history.values()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["epoch", *history])
            writer.writerows(zip(range(1, last + 1), *columns, strict=True))


class ProgressBar(Callback):
    """Show a progress bar per epoch on rank 0's standard error, with tqdm."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._make, self._bar = tqdm, tqdm(disable=True)

    def on_epoch_start(self) -> None:
        title, elsewhere = f"epoch {self.handler.epoch + 1}", self.handler.rank > 0
        self._bar = self._make(desc=title, total=self.handler.steps_left, disable=elsewhere)

    def on_step_end(self) -> None:
        self._bar.set_postfix(self.handler.running, refresh=False)
        self._bar.update()

    def on_validation_start(self) -> None:
        """Close the bar, so that the next output starts on a line of its own."""
        self._bar.close()

    on_train_end = on_validation_start


def ordered(callbacks: Sequence[Callback], run_dir: str | Path | None) -> list[Callback]:
    """Return the user's callbacks and ours, which come last to see what the others changed.

    A Checkpoint comes after all other callbacks of the user's: a resumed run does not call their
    hooks again, so what these draw and change must be in the file.
    """
    every = sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))
    if run_dir is not None and not any(isinstance(callback, Checkpoint) for callback in every):
        every.append(Checkpoint(run_dir))
    return every if run_dir is None else [*every, HistoryFile(run_dir)]


def check_monitors(handler: "Handler") -> None:
    """Raise ValueError if a callback or the scheduler watches what nothing records."""
    own = handler.names("train") + (handler.names("val") if handler.val_loader is not None else [])
    known = [*own, *handler.history]
    known += [name for callback in handler.callbacks for name in callback.records]
    watched = [getattr(callback, "monitor", None) for callback in handler.callbacks]
    for name in watched:
        if name is not None and name not in known:
            raise ValueError(
                f"nothing records {name!r}: use one of {', '.join(sorted({*known}))}, or name it "
                "in `records` of the Callback that adds it to the history"
            )
    unit = handler.scheduler_unit
    if unit not in (None, "step", "epoch", *own):
        raise ValueError(
            f"the scheduler cannot watch {unit!r}: use one of {', '.join(sorted(own))}, which are "
            "recorded before it steps"
        )


def _check_mode(mode: str) -> None:
    if mode not in ("min", "max"):
        raise ValueError(f'mode must be "min" or "max", not {mode!r}')


def _epochs_since_best(values: Sequence[float], min_delta: float, mode: str) -> int:
    """Return how many epochs have passed since the best value; 0 if the last value is the best."""
    sign = 1 if mode == "min" else -1
    best, waited = math.inf, 0
    for value in (value for value in values if not math.isnan(value)):
        improved = sign * value < best - min_delta
        best, waited = (sign * value, 0) if improved else (best, waited + 1)
    return waited
