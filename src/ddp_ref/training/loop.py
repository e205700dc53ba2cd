"""The training loop: an epoch and an optimizer step, from top to bottom. Read this file first."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..collectives import gather_objects
from ..randomness import generator_state, set_generator_state
from .callbacks import Callback, monitored
from .checkpoint import check_finite, load_weights, weights
from .data import TrainBatches
from .loss_and_metrics import LossAndMetrics
from .model import CPU, copied, copied_buffers, move, restore_buffers
from .rank_sync import GlobalSummary, RankSync, WindowCount, caught_signals
from .train_state import RngState, TrainState

EXIT_CODE = 143  # of a process that SIGTERM ended
# The batches of a step, each with its number of items, to check the count of samples against.
Window = list[tuple[Any, int | None]]


class Signalled(SystemExit):
    """A signal has reached some rank. All ranks raise this at the same step."""


@dataclass(eq=False)
class TrainLoop:
    """Run epochs.

    Within an epoch the ranks wait for each other only where DDP averages gradients and, with
    `count`, where they add up their counts. Every `sync_every` steps they start one small summary
    and read it after the next step. All of them decide from the same numbers, so they all stop,
    save or raise at the same step.
    """

    model: nn.Module  # in DDP if there are other ranks
    optimizer: torch.optim.Optimizer
    task: LossAndMetrics  # how a batch becomes outputs, a loss, metrics and a count
    callbacks: list[Callback]
    rng: RngState  # this rank's random number generators
    scheduler: Any  # None for none
    scheduler_unit: str | None  # "step", "epoch", or what ReduceLROnPlateau watches in the history
    scaler: torch.amp.GradScaler  # enabled for float16 alone
    clip_norm: float | None  # upper bound for the norm of the gradients
    skip_nonfinite: bool  # leave out steps with non-finite gradients, instead of raising an error
    sync_every: int  # optimizer steps between two summaries
    distributed: bool  # whether there are other ranks
    log: Callable[[str], None]
    batches: TrainBatches | None = None  # the training data
    state: TrainState = field(default_factory=TrainState)  # the same on all ranks

    def __post_init__(self) -> None:
        self.rank_sync = RankSync(self.task.device, self.distributed)
        self.sums = self.task.new_sums(self.distributed)  # of this epoch, on this rank
        self.running: dict[str, float] = {}  # this epoch's means in the latest summary
        self.stopping = False
        loss_fn = self.task.loss_fn  # its state, if it has one, is this rank's own
        self._loss_module = loss_fn if isinstance(loss_fn, nn.Module) else nn.Identity()
        self._warm_ups = 0  # passes that a new DDP needs before its next step, see `_warm_up`
        self._parameters = list(self.model.parameters())  # looking them up would take much longer
        self._trainable = [parameter.requires_grad for parameter in self._parameters]
        self._scale: float | None = None  # the loss scale after the last step

    def train(
        self, epochs: int, max_steps: int | None, validate: Callable[[], dict[str, float]]
    ) -> None:
        """Train until `epochs` epochs or `max_steps` optimizer steps have ended in total."""
        state, self.stopping = self.state, False
        last_step = math.inf if max_steps is None else max_steps
        if state.epoch >= epochs:
            self.log(f"nothing to train: {state.epoch} of {epochs} epochs have ended already")
        self.rank_sync.reset()
        with caught_signals(self.rank_sync.signals):
            for callback in self.callbacks:
                callback.on_train_start()
            self._decide_together()
            self._step_epoch_scheduler()  # on a resume: the file is from before it stepped
            while state.epoch < epochs and state.step < last_step and not self.stopping:
                self._train_epoch(last_step, validate)
            for callback in self.callbacks:
                callback.on_train_end()

    def _train_epoch(self, last_step: float, validate: Callable[[], dict[str, float]]) -> None:
        state = self.state
        self.sums.discard()  # of a step that an exception has interrupted
        self.model.train()
        if not state.samples_seen:
            self.rng.restore()
            self.running = {}
        for callback in self.callbacks:
            callback.on_epoch_start()
        batches = self._start_epoch()  # now, because a hook may have replaced the training data
        self.rng.restore()  # on a mid-epoch resume, to undo what the hooks have drawn
        for window in batches.windows():
            self._check_trainable()
            self._train_step(window)
            state.samples_seen += len(window) * batches.samples_per_batch
            for callback in self.callbacks:
                callback.on_step_end()
            self._apply(self.rank_sync.finish())
            if state.step == last_step and batches.steps_left(state.samples_seen) != 0:
                self._decide_together()
                return
            if self.stopping:
                return
            if state.step % self.sync_every == 0:
                self.rank_sync.start(self.sums.count, self.sums.totals)
        self._decide_together()
        for callback in self.callbacks:
            callback.on_validation_start()
        self._end_epoch(validate)
        for callback in self.callbacks:
            callback.on_epoch_end()
        self._decide_together()
        self._step_epoch_scheduler()  # last: an error of the scheduler's must not cost the epoch

    def _train_step(self, window: Window) -> None:
        """Take one optimizer step with the mean gradient over the samples of all batches."""
        task, sums, scaler, optimizer = self.task, self.sums, self.scaler, self.optimizer
        counts = [task.count(batch, items) for batch, items in window]
        counts_may_differ = task.counts_may_differ and self.distributed
        window_count = WindowCount(counts, task.device, counts_may_differ)
        self._warm_up(window[0][0])
        buffers = copied_buffers(self.model, self._loss_module) if self.skip_nonfinite else []
        optimizer.zero_grad()
        for number, ((batch, _), count) in enumerate(zip(window, counts, strict=True), start=1):
            with self._gradient_sync(enabled=number == len(window)):
                with task.autocast:
                    outputs, targets = task.forward(self.model, batch)
                    loss = task.loss_fn(outputs, targets)
                    sums.add(count, loss, outputs, targets)
                scaler.scale(window_count.scale(loss, count)).backward()
        scaler.unscale_(optimizer)
        # Read the scale once per step, because in fp16 reading it waits for the GPU.
        taken, scale = self._clip(), self._scale or scaler.get_scale()
        if taken:
            scaler.step(optimizer)
        scaler.update()
        self._scale = scaler.get_scale()
        # GradScaler skips a step with infinite gradients. The only sign is the smaller scale.
        taken = taken and self._scale >= scale
        if taken and self.scheduler_unit == "step":
            self.scheduler.step()
        if taken or not self.skip_nonfinite:
            sums.commit()
        else:
            sums.discard()
            restore_buffers(buffers)
        self.state.step += 1
        self.state.skipped += not taken

    def _gradient_sync(self, enabled: bool) -> Any:
        """Return a context in which DDP averages the gradients only if `enabled`."""
        if enabled or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def _clip(self) -> bool:
        """Clip the gradients; return False if they are not finite and the step must be skipped."""
        if self.clip_norm is None and not self.skip_nonfinite:
            return True
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # DDP has already averaged the gradients, so all ranks agree.
        if self.skip_nonfinite and not torch.isfinite(norm):
            return False
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
        return True

    # The two ends of an epoch

    def _start_epoch(self) -> TrainBatches:
        """Return the training data, at the place where the run is."""
        state, batches = self.state, self.batches
        assert batches is not None  # Handler.train has checked it
        if state.samples_seen and state.data != batches.fingerprint:
            raise ValueError(
                f"an epoch that started with {state.data} cannot go on with {batches.fingerprint}: "
                "use the same data, shuffle and sampler, or load a checkpoint of an epoch's end"
            )
        state.data = batches.fingerprint
        can_continue = batches.seek(state.epoch, state.samples_seen)
        if not can_continue:
            self._reset_epoch()
        return batches

    def _check_trainable(self) -> None:
        """Raise RuntimeError if parameters were frozen or unfrozen, which DDP does not notice."""
        if self._trainable != [parameter.requires_grad for parameter in self._parameters]:
            raise RuntimeError(
                "requires_grad has changed since Handler wrapped the model: set it before, or "
                "save, and continue with a new Handler that loads the file"
            )

    def _end_epoch(self, validate: Callable[[], dict[str, float]]) -> None:
        """Validate, and add the epoch to the history."""
        state = self.state
        if not state.samples_seen:
            size = self.batches and self.batches.loader.batch_size
            raise ValueError(f"no batch of {size} samples: lower batch_size or leave out drop_last")
        if not self.skip_nonfinite:
            check_finite(self.model)
        self.running |= self.sums.compute()
        values = {f"train_{name}": value for name, value in self.running.items()}
        values |= {f"val_{name}": value for name, value in validate().items()}
        state.epoch += 1
        state.record(values, list(self.running))
        if self.scheduler_unit not in (None, "step"):
            state.scheduler_due = "val_loss" if "val_loss" in values else "train_loss"
        self._reset_epoch()
        text = " | ".join(f"{name} {value:.4g}" for name, value in values.items())
        skipped = f" | {state.skipped} steps skipped" if state.skipped else ""
        self.log(f"epoch {state.epoch} | {text}{skipped}")

    def _reset_epoch(self) -> None:
        self.state.samples_seen = 0
        self.sums = self.task.new_sums(self.distributed)

    def _step_epoch_scheduler(self) -> None:
        """Step a per-epoch scheduler if an epoch has ended since its last step."""
        due, self.state.scheduler_due = self.state.scheduler_due, ""
        with warnings.catch_warnings():  # torch cannot know that the steps came before a resume
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            if due and isinstance(self.scheduler, ReduceLROnPlateau):
                watched = due if self.scheduler_unit == "epoch" else str(self.scheduler_unit)
                self.scheduler.step(monitored(self.state.history, watched)[-1])
            elif due:
                self.scheduler.step()

    def _warm_up(self, batch: Any) -> None:
        """Let a new DDP build the buckets that it had before a resume; undo the rest.

        DDP rebuilds its buckets after the first backward pass. On three ranks or more the buckets
        decide in which order gradients are summed, so without this a resumed run would differ from
        the uninterrupted one in the last bits.
        """
        passes, self._warm_ups = self._warm_ups, 0
        for _ in range(passes if isinstance(self.model, DistributedDataParallel) else 0):
            rng_state = generator_state(self.task.device)
            buffers = copied_buffers(self.model, self._loss_module)
            with self.task.autocast:
                loss = self.task.loss_fn(*self.task.forward(self.model, copied(batch)))
            loss.backward()
            self.model.zero_grad()
            restore_buffers(buffers)
            set_generator_state(rng_state, self.task.device)

    # Decisions, which all ranks take alike

    def _decide_together(self) -> None:
        """Finish the pending summary, then make one more at once, and act on both (collective)."""
        self._apply(self.rank_sync.finish())
        self.rank_sync.start(self.sums.count, self.sums.totals)
        self._apply(self.rank_sync.finish())

    def _apply(self, summary: GlobalSummary | None) -> None:
        """Act on a summary, if there is one. All ranks do the same."""
        if summary is None:
            return
        if summary.nonfinite and not self.skip_nonfinite:
            raise FloatingPointError(
                f"a loss of epoch {self.state.epoch + 1} is not finite, noticed at step "
                f'{self.state.step}: lower the learning rate, set clip_norm or on_nonfinite="skip"'
            )
        if self.state.samples_seen:  # before the first step, there are no means
            self.running = self.sums.named(summary.means)
        self.stopping = self.stopping or summary.stop
        if summary.signalled:
            raise Signalled(EXIT_CODE)

    # What a checkpoint holds

    @property
    def parts(self) -> dict[str, Any]:
        """The objects with a state dict, by their name in a checkpoint."""
        scaler = self.scaler if self.scaler.is_enabled() else None
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return on rank 0 what a checkpoint holds, {} elsewhere (collective).

        All tensors are on the CPU: a checkpoint that named a GPU could not be loaded on a machine
        without one.
        """
        states = {"rng": self.rng.state_dict(), "sums": self.sums.state_dict()}
        own = move(states | {"loss_fn": self._loss_module.state_dict()}, CPU)
        if not (ranks := gather_objects(own) if self.distributed else [own]):
            return {}
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        shared: dict[str, Any] = move(parts | asdict(self.state), CPU)
        return {"model": weights(self.model), "ranks": ranks} | shared

    def load_state_dict(self, saved: dict[str, Any], rank: int, world_size: int) -> None:
        """Continue the run that was saved, also at another world size."""
        load_weights(self.model, saved["model"])
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        self._scale = None
        for name in asdict(self.state):
            setattr(self.state, name, saved[name])
        ranks = saved["ranks"]
        same_ranks = len(ranks) == world_size
        self.rng.load_state_dict(ranks[rank]["rng"] if same_ranks else None, self.state.step)
        self._loss_module.load_state_dict(ranks[rank if same_ranks else 0]["loss_fn"])
        # DDP builds its final buckets after one step, with static_graph after two. At another world
        # size, gradients are summed in another order anyway.
        steps = 2 if getattr(self.model, "static_graph", False) else 1
        self._warm_ups = min(self.state.step, steps) if same_ranks else 0
        self.running, self.sums = {}, self.task.new_sums(self.distributed)
        # At another world size, each rank takes a share of the old ranks' sums.
        self.sums.load_state_dict([past["sums"] for past in ranks[rank::world_size]], same_ranks)
