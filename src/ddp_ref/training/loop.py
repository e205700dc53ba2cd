"""The training loop: an epoch and a step, from top to bottom. Read this file first."""

import warnings
from typing import Any

from .checkpoint import NAME, check_finite
from .ddp_model import copied_buffers, gradient_sync, restore_buffers, warm_up_ddp_buckets
from .rank_sync import GlobalSummary, RankSync, WindowCount, caught_signals

EXIT_CODE = 143  # of a process that SIGTERM ended


class TrainLoop:
    """Run the epochs of a Handler.

    Within an epoch the ranks wait for each other only where DDP averages gradients. Every
    `sync_every` steps they start one small summary and read it after the next step. All of them
    decide from the same numbers, so they all stop, save or raise at the same step.
    """

    def __init__(self, handler: Any) -> None:
        self.handler, self.model, self.state = handler, handler.model, handler.state
        self.loss_and_metrics = handler.loss_and_metrics
        self.optimizer_step = handler.optimizer_step
        self.distributed = handler.info.distributed
        self.rank_sync = RankSync(handler.device, self.distributed)
        self._trainable = [parameter.requires_grad for parameter in self.model.parameters()]

    def train(self, epochs: int) -> None:
        """Train until `epochs` epochs have ended in total."""
        self.stopping = False
        if (past := self.state.epoch) >= epochs:
            self.handler.log(f"nothing to train: {past} of {epochs} epochs have ended already")
        self.rank_sync.reset()
        with caught_signals(self.rank_sync.signals):
            self._call("on_train_start")
            self._sync()
            self._step_epoch_scheduler()  # the checkpoint was written before it stepped
            while self.state.epoch < epochs and not self.stopping:
                self._train_epoch()
            self._call("on_train_end")

    def _train_epoch(self) -> None:
        handler, state, batches = self.handler, self.state, self.handler.train_batches
        if not batches.seek(state):
            self._reset_epoch()
        if not state.samples_seen:
            handler.rng.restore()
            state.running = {}
        self.model.train()
        self._call("on_epoch_start")  # may put parts of the model into eval mode, or freeze them
        self._check_requires_grad()
        handler.rng.restore()  # on a mid-epoch resume, to undo what the hooks have drawn
        for window in batches.windows():
            self._train_step(window)
            state.samples_seen += len(window) * batches.samples_per_batch
            self._call("on_step_end")
            self._apply(self.rank_sync.finish())
            if self.stopping:
                return
            if state.step % handler.sync_every == 0:
                self.rank_sync.start(state.sums)
        if not state.samples_seen:
            size = batches.loader.batch_size
            raise ValueError(f"no batch of {size} samples: lower batch_size or leave out drop_last")
        self._sync()
        self._end_epoch()

    def _train_step(self, window: list[Any]) -> None:
        """Take one optimizer step with the mean gradient over the samples of all batches."""
        state, step, measure = self.state, self.optimizer_step, self.loss_and_metrics
        counts = [measure.count(batch) for batch in window]
        if not state.warmed_up:
            warm_up_ddp_buckets(self.model, lambda: measure(self.model, window[0]).loss)
            state.warmed_up = True
        buffers = copied_buffers(self.model) if step.skip_nonfinite else []
        window_count = WindowCount(counts, measure.device, measure.has_count and self.distributed)
        results = []
        step.optimizer.zero_grad()
        for number, (batch, count) in enumerate(zip(window, counts, strict=True), start=1):
            with gradient_sync(self.model, enabled=number == len(window)):
                result = measure(self.model, batch)  # the forward pass
                step.backward(window_count.scale(result.loss, count))
            results.append((count, result))
        finite = step.clip()
        taken = step.step(finite)  # the optimizer, and a scheduler that steps with it
        # A step that was not meant to be skipped must report its loss, finite or not.
        if taken or not step.skip_nonfinite:
            for count, result in results:
                state.sums.add(count, result)
        else:
            restore_buffers(buffers)
        state.step += 1

    def _end_epoch(self) -> None:
        state, handler = self.state, self.handler
        if not self.optimizer_step.skip_nonfinite:
            check_finite(self.model)
        state.running = state.running | state.sums.compute(self.distributed)
        values = {f"train_{name}": value for name, value in state.running.items()}
        if handler.val_loader is not None:
            values |= {f"val_{name}": value for name, value in handler.validate().items()}
        state.epoch += 1
        state.record(values, ["loss", *handler.metrics])
        state.due_loss = values.get("val_loss", values["train_loss"])
        self._reset_epoch()
        text = " | ".join(f"{name} {value:.4g}" for name, value in values.items())
        skipped = f" | {handler.skipped} steps skipped" if handler.skipped else ""
        handler.log(f"epoch {state.epoch} | {text}{skipped}")
        self._call("on_epoch_end")
        self._sync()
        self._step_epoch_scheduler()  # last: an error of the scheduler's must not cost the epoch

    # Decisions, which all ranks take alike

    def _call(self, hook: str) -> None:
        """Call `hook` of each callback. An exception ends this process at once."""
        for callback in self.handler.callbacks:
            getattr(callback, hook)()

    def _sync(self) -> None:
        """Finish the pending summary, then make one more at once, and act on both (collective)."""
        self._apply(self.rank_sync.finish())
        self.rank_sync.start(self.state.sums)
        self._apply(self.rank_sync.finish())

    def _apply(self, summary: GlobalSummary | None) -> None:
        """Act on a summary, if there is one. All ranks do the same."""
        if summary is None:
            return
        if summary.nonfinite and not self.optimizer_step.skip_nonfinite:
            raise FloatingPointError(
                f"a loss of epoch {self.state.epoch + 1} is not finite, noticed at step "
                f'{self.state.step}: lower the learning rate, set clip_norm or on_nonfinite="skip"'
            )
        if self.state.samples_seen:  # before the first step, there are no means
            self.state.running = summary.means
        self.stopping = self.stopping or summary.stop
        if summary.signalled:
            self._save_and_exit()

    def _save_and_exit(self) -> None:
        """Save a checkpoint of this step on all ranks, then exit."""
        if folder := self.handler.save_folder:
            self.handler.save(folder / NAME.format(self.state.step))
        self.handler.log(f"ended by a signal at step {self.state.step}")
        raise SystemExit(EXIT_CODE)

    # Details

    def _reset_epoch(self) -> None:
        self.state.samples_seen = 0
        self.state.sums = self.loss_and_metrics.new_sums(self.distributed)

    def _step_epoch_scheduler(self) -> None:
        """Step a per-epoch scheduler if an epoch has ended since its last step."""
        if self.state.due_loss is not None:
            self.optimizer_step.step_epoch_scheduler(self.state.due_loss)
            self.state.due_loss = None

    def _check_requires_grad(self) -> None:
        """Warn if parameters were frozen or unfrozen after DDP had registered its hooks."""
        now = [parameter.requires_grad for parameter in self.model.parameters()]
        if self.distributed and now != self._trainable:
            why = "requires_grad has changed since DDP wrapped the model, which DDP does not notice"
            warnings.warn(f"{why}: freeze parameters before you create the Handler", stacklevel=2)
        self._trainable = now
