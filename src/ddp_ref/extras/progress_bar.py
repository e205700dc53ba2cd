"""A progress bar for each epoch, with tqdm."""

import warnings
from typing import Any

from ..training.callbacks import Callback


class ProgressBar(Callback):
    """Show a progress bar per epoch on rank 0's standard error. Without tqdm, warn instead."""

    _bar: Any = None

    def on_epoch_start(self) -> None:
        self.on_epoch_end()
        if self.handler.rank:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            warnings.warn("no progress bar without tqdm: pip install tqdm", stacklevel=2)
            return
        self._bar = tqdm(desc=f"epoch {self.handler.epoch + 1}", total=self.handler.steps_left)

    def on_step_end(self) -> None:
        if self._bar is not None:  # a bar without a length is falsy
            self._bar.set_postfix(self.handler.running, refresh=False)
            self._bar.update()

    def on_epoch_end(self) -> None:
        """Close the bar, so that the next output starts on a line of its own."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    on_train_end = on_epoch_end
