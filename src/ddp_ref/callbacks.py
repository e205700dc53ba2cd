"""What happens beside training: hooks that every rank calls, in the same order."""

import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checkpoint import NAME, numbered, step_of, sweep
from .data import check_count


class Callback:
    """Take part in `Handler.train`: override the hooks you need.

    Every rank calls each hook, in the order of the handler's list, so a hook may be collective if
    all ranks make the call. An exception is raised on all ranks, with its type, once they have
    heard of it: within an epoch a step after the next exchange. Until then the rank trains on.
    A signal ends training once all have been called, also where a save of theirs heard of it.
    """

    handler: Any  # the Handler, set when it is given this callback

    def on_train_start(self) -> None:
        """Called once `train` has begun, before the first epoch."""

    def on_epoch_start(self) -> None:
        """Called before the first batch of an epoch, and again where one is resumed."""

    def on_step_end(self) -> None:
        """Called after each optimizer step; `handler.step` counts it."""

    def on_epoch_end(self) -> None:
        """Called after validation; the histories and `handler.epoch` count the epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch; not after an exception or a signal."""


class EarlyStopping(Callback):
    """Stop when `monitor` has not improved by more than `min_delta` for `patience` epochs.

    `monitor` names a list of `handler.history`; `mode` is "min" or "max". It looks at the history
    alone, and so goes on counting in a resumed run. Epochs without a value (NaN) do not count.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 5,
        min_delta: float = 0.0,
        mode: str = "min",
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", not {mode!r}')
        if patience < 1 or not min_delta >= 0:
            raise ValueError(
                "patience must be at least 1 and min_delta at least 0, "
                f"not {patience!r} and {min_delta!r}"
            )
        self.monitor, self.patience, self.min_delta, self.mode = monitor, patience, min_delta, mode

    def on_train_start(self) -> None:
        if self.handler.epoch:  # a resumed run may have been stopped
            self.on_epoch_end()

    def on_epoch_end(self) -> None:
        values = _monitored(self.handler, self.monitor)
        if (waited := _waited(values, self.min_delta, self.mode)) >= self.patience:
            self.handler.log(f"{self.monitor} has not improved for {waited} epochs: stop")
            self.handler.stop()


class LearningRateMonitor(Callback):
    """Note the learning rate each epoch begins with: `handler.history["lr"]`.

    With several parameter groups it is that of the first; "lr_1" and so on are the others'. Epochs
    before this callback was there have NaN.
    """

    def on_epoch_start(self) -> None:
        for number, group in enumerate(self.handler.optimizer.param_groups):
            rates = self.handler.history.setdefault(f"lr_{number}" if number else "lr", [])
            rates += [math.nan] * (self.handler.epoch - len(rates))
            if len(rates) == self.handler.epoch:  # not yet noted, where an epoch is resumed
                rates.append(float(group["lr"]))


class Checkpoint(Callback):
    """Save into `folder` every N epochs, every K steps and at the end; keep the last `keep`.

    None is never. Files are named by the optimizer step, step_000000120.pt; rank 0 writes them.
    With `monitor`, best.pt is the epoch with the best value so far: the lowest of a loss, the
    highest of a metric.
    `Handler` also saves here when a signal ends it, and `Handler.load(folder)` takes the newest.
    """

    def __init__(
        self,
        folder: str | Path,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        keep: int = 3,
        monitor: str | None = None,
    ) -> None:
        numbers = {"every_epochs": every_epochs, "every_steps": every_steps, "keep": keep}
        for name, number in numbers.items():
            if number is not None:
                check_count(name, number)
        self.folder, self.monitor = Path(folder), monitor
        self.every_epochs, self.every_steps, self.keep = every_epochs, every_steps, keep

    def on_train_start(self) -> None:
        self._saved = self._now()
        if self.handler.rank == 0:
            sweep(self.folder)
            later = [path for path in numbered(self.folder) if step_of(path) > self.handler.step]
            if later:
                warnings.warn(
                    f"{later[-1]} is of a later step than this run's {self.handler.step}, "
                    "load(folder) will prefer it: load it now, or move it away",
                    stacklevel=2,
                )

    def on_step_end(self) -> None:
        if self.every_steps and self.handler.step % self.every_steps == 0:
            self._save()

    def on_epoch_end(self) -> None:
        if self.every_epochs and self.handler.epoch % self.every_epochs == 0:
            self._save()
        if self.monitor:
            mode = "min" if self.monitor in ("train_loss", "val_loss") else "max"
            values = _monitored(self.handler, self.monitor)
            if math.isfinite(values[-1]) and _waited(values, 0.0, mode) == 0:
                self.handler.save(self.folder / "best.pt")

    def on_train_end(self) -> None:
        if self._saved != self._now():  # the last epochs, or the steps before a stop
            self._save()

    def _now(self) -> tuple[int, int]:
        return self.handler.step, self.handler.epoch

    def _save(self) -> None:
        self._saved, step = self._now(), self.handler.step
        self.handler.save(self.folder / NAME.format(step))
        self.handler.log(f"saved {self.folder / NAME.format(step)}")
        if self.handler.rank == 0:
            # Those of later steps are another run's: they count as none of ours.
            ours = [path for path in numbered(self.folder) if step_of(path) <= step]
            for path in ours[: -self.keep]:
                path.unlink(missing_ok=True)


class ProgressBar(Callback):
    """Show the steps of each epoch on standard error; without tqdm one warning, and no bar."""

    _tqdm: Any = None
    _bar: Any = None

    def on_train_start(self) -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            warnings.warn("no progress bar without tqdm: pip install tqdm", stacklevel=2)
        else:
            self._tqdm = tqdm

    def on_epoch_start(self) -> None:
        handler = self.handler
        self.close()
        if self._tqdm:
            what = f"epoch {handler.epoch + 1}"
            self._bar = self._tqdm(total=handler.steps_left, desc=what, file=sys.stderr)

    def on_step_end(self) -> None:
        if self._bar is not None:  # a bar without a length is false
            self._bar.set_postfix(self.handler.running, refresh=False)
            self._bar.update()

    def on_epoch_end(self) -> None:
        self.close()

    def on_train_end(self) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it is, so that what is written next starts a line of its own."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _monitored(handler: Any, name: str) -> Sequence[float]:
    if not handler.history.get(name):
        known = ", ".join(name for name, values in handler.history.items() if values)
        raise ValueError(f"monitor {name!r} has no values, there are: {known}")
    return handler.history[name]


def _waited(values: Sequence[float], min_delta: float, mode: str) -> int:
    """Return for how many values the best has not improved; 0: the last one is the best."""
    sign = 1 if mode == "min" else -1
    best, waited = math.inf, 0
    for value in values:
        if math.isnan(value):
            continue
        improved = sign * value < best - min_delta
        best, waited = (sign * value, 0) if improved else (best, waited + 1)
    return waited
