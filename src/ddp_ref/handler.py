"""Handler: train a model on one process or on many with the same code."""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .collectives import gather_objects
from .decorators import on_rank
from .initialize import _resolve_device, initialize_ddp
from .training.batches import pair, samples_in
from .training.callbacks import Callback, Checkpoint, ProgressBar
from .training.checkpoint import (
    NAME,
    check_finite,
    find,
    load_weights,
    unwrap_model,
    weights,
    write,
)
from .training.data import TrainSampler, check_count, shard_loader, train_loader
from .training.ddp_model import gradient_sync, wrap_model
from .training.evaluation import evaluating, outputs_in_order
from .training.loss_and_metrics import LossAndMetrics
from .training.optimizer_step import Optimization, check_parameters
from .training.plotting import plot_losses, plot_metrics
from .training.rank_sync import RankSync, Value, caught_signals
from .training.resume_point import (
    batches_from,
    batches_left,
    check_same_data,
    data_fingerprint,
    order_is_reproducible,
    samples_seen_after,
    seek,
)
from .training.run_folder import RunFolder
from .training.sharded_data import check_same
from .training.train_state import (
    RngState,
    check_fits,
    copied_buffers,
    restore_buffers,
    warm_up_ddp_buckets,
)

logger = logging.getLogger(__name__)
R = TypeVar("R")
EXIT_CODE = 143  # of a process that SIGTERM ended
NONFINITE = 'lower the learning rate, set clip_norm, or use on_nonfinite="skip"'


class Handler:
    """Train, evaluate and save a model on every rank of the launch, or on this process alone.

    The constructor and all methods are collective, so all ranks call them, except `stop`,
    `evaluate` and `log`. A batch is `(inputs, targets)`. A signal (SIGTERM or SIGUSR1) ends
    training with a checkpoint.

    Args:
        model: The model, not wrapped in DDP.
        optimizer: An optimizer of the model's parameters.
        loss_fn: `loss_fn(outputs, targets)`, a mean over samples.
        metrics: Functions by name, called like `loss_fn`; each is a mean over samples.
        scheduler: A scheduler that steps once per epoch, or `(scheduler, "step")` for one that
            steps after each optimizer step.
        callbacks: Hooks that run during training.
        device: Where to train; None for the device that `initialize_ddp` chose.
        use_distributed: False for this process alone, True to require a distributed launch, None
            to find out from the environment.
        accumulate: Batches per optimizer step.
        clip_norm: Upper bound for the norm of the gradients.
        precision: "fp32", "bf16" or "fp16".
        on_nonfinite: "raise" ends training with FloatingPointError if a loss is not finite. "skip"
            leaves out steps with non-finite gradients. With fp16, steps whose gradients overflow
            are always left out.
        sync_every: Optimizer steps between two summaries, in which the ranks share losses, errors
            and signals. A summary overlaps the next step, so no rank waits for it.
        seed: The seed of the data order, and, with the rank, of dropout.
        run_dir: A folder for this run's configuration, log, history and figures, and for a
            checkpoint per epoch, unless `callbacks` has a Checkpoint with its own folder.
        find_unused_parameters: DDP's option; None means: if the environment variable
            DDP_FIND_UNUSED_PARAMETERS is 1 or true.

    Raises:
        ValueError: If a setting is wrong or the device does not support it, or if the optimizer
            has parameters that are not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        metrics: Mapping[str, Callable[[Any, Any], Value]] | None = None,
        scheduler: Any = None,
        callbacks: Sequence[Callback] = (),
        device: torch.device | str | None = None,
        use_distributed: bool | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: str = "fp32",
        on_nonfinite: str = "raise",
        sync_every: int = 10,
        seed: int = 0,
        run_dir: str | Path | None = None,
        find_unused_parameters: bool | None = None,
    ) -> None:
        wanted = None if device is None else _resolve_device(device)
        backend = "gloo" if wanted and wanted.type == "cpu" else None
        #: what initialize_ddp returned
        self.info = initialize_ddp(backend=backend, use_distributed=use_distributed)
        # Without an index, "cuda" means the rank's own GPU.
        if wanted is None or wanted == torch.device(self.info.device.type):
            self.device = self.info.device
        else:
            self.device = wanted
        if self.info.distributed and self.device.type == "cpu" and dist.get_backend() == "nccl":
            raise ValueError(
                "device is cpu, but the open group uses nccl: leave out device, or call cleanup_ddp"
            )
        check_count("accumulate", accumulate)
        check_count("sync_every", sync_every)
        self.optimizer = optimizer  #: the optimizer that was given
        self.metrics = dict(metrics or {})
        self.accumulate, self.sync_every, self.seed = accumulate, sync_every, seed
        self.clip_norm, self.precision, self.on_nonfinite = clip_norm, precision, on_nonfinite
        self._optimization = Optimization(
            optimizer,
            scheduler,
            self.device,
            clip_norm=clip_norm,
            precision=precision,
            on_nonfinite=on_nonfinite,
        )
        self.scheduler = self._optimization.scheduler
        autocast = self._optimization.autocast
        self.loss_and_metrics = LossAndMetrics(loss_fn, self.metrics, self.device, autocast)
        check_parameters(optimizer, model)
        #: the model, wrapped in DDP if there are other ranks
        self.model = wrap_model(model, self.device, self.info.distributed, find_unused_parameters)
        # For everything but training, because a forward pass of DDP may be collective.
        self._unwrapped = unwrap_model(self.model)
        self._run_folder = None if run_dir is None or self.rank else RunFolder(run_dir)
        self.callbacks = self._all_callbacks(callbacks, run_dir)

        self.epoch = 0  #: how many epochs have ended
        self.step = 0  #: how many optimizer steps were taken, in all epochs
        #: how many samples of this epoch all ranks have drawn; batches per rank with own samplers
        self.samples_seen = 0
        #: the values of each epoch, under names such as "train_loss" and "val_loss"
        self.history: dict[str, list[float]] = {}
        #: this epoch's mean "loss" and metrics in the latest summary; {} before the first one
        self.running: dict[str, float] = {}
        self._sums = self.loss_and_metrics.new_sums()
        self._rank_sync = RankSync(self.info.distributed)
        self._stopping = self._signalled = False
        self._rng = RngState(seed, self.rank, self.device)
        self._data: dict[str, int | None] = {}  # data_fingerprint of the epoch
        self._warmed_up = True
        self.train_loader: DataLoader[Any] | None = None
        self.val_loader: DataLoader[Any] | None = None

    @property
    def rank(self) -> int:
        """This process's rank; 0 if it is alone."""
        return self.info.rank

    @property
    def skipped(self) -> int:
        """How many optimizer steps were skipped because their gradients were not finite."""
        return self._optimization.skipped

    @property
    def trained_on(self) -> int | None:
        """How many samples the training set of the last epoch had; None before the first epoch."""
        return self._data.get("samples")

    @property
    def train_losses(self) -> list[float]:
        """The mean training loss of each epoch, over the samples of all ranks."""
        return self.history.get("train_loss", [])

    @property
    def val_losses(self) -> list[float]:
        """The mean validation loss of each epoch."""
        return self.history.get("val_loss", [])

    @property
    def train_metrics(self) -> dict[str, list[float]]:
        """Each metric's mean over the training samples of each epoch."""
        return {name: self.history.get(f"train_{name}", []) for name in self.metrics}

    @property
    def val_metrics(self) -> dict[str, list[float]]:
        """Each metric's mean over the validation samples of each epoch."""
        return {name: self.history.get(f"val_{name}", []) for name in self.metrics}

    @property
    def steps_left(self) -> int | None:
        """How many optimizer steps the epoch has left; None if the data has no length."""
        if self.train_loader is None:
            return None
        batches = batches_left(self.train_loader, self.samples_seen)
        return None if batches is None else -(-batches // self.accumulate)

    def set_train_loader(self, dataset: Dataset[Any], batch_size: int, **loader: Any) -> None:
        """Set the training data.

        Args:
            dataset: The training set, the same on all ranks.
            batch_size: Samples per rank and batch.
            **loader: Anything else that DataLoader takes.

        Raises:
            ValueError: If an option is wrong, the data has no batch, or its length differs
                between ranks.
        """
        self.train_loader = train_loader(
            dataset,
            batch_size,
            rank=self.rank,
            world_size=self.info.world_size,
            seed=self.seed,
            **loader,
        )
        self._check_same(items=_length(dataset), batches=_length(self.train_loader))
        if batches_left(self.train_loader, samples_seen=0) == 0:
            raise ValueError(
                f"an epoch has no batch of {batch_size} samples: use a smaller batch_size, or "
                "leave out drop_last"
            )
        sampler = self.train_loader.sampler
        if isinstance(sampler, TrainSampler) and sampler.repeated:
            self.log(
                f"{sampler.size} samples on {sampler.world_size} ranks: {sampler.repeated} of them "
                "are repeated in each epoch, so that all ranks take the same number of steps"
            )

    def set_val_loader(self, dataset: Dataset[Any], batch_size: int, **loader: Any) -> None:
        """Set the validation data. Each item is used exactly once, on one of the ranks.

        Args:
            dataset: The validation set, the same on all ranks.
            batch_size: Samples per rank and batch.
            **loader: Anything else that DataLoader takes, except shuffling and samplers.

        Raises:
            ValueError: If an option is wrong, or the length differs between ranks.
        """
        self.val_loader = self._shard(dataset, batch_size, **loader)

    def train(self, epochs: int) -> None:
        """Train until `epochs` epochs have ended in total: after `load`, only the missing ones.

        Raises:
            FloatingPointError: On all ranks, if a loss is not finite.
            SystemExit: On all ranks with code 143, after SIGTERM or SIGUSR1 and a checkpoint.
            Exception: On all ranks, what a callback raised.
        """
        if self.train_loader is None:
            raise ValueError("there is no training data: call set_train_loader first")
        self._begin()
        with caught_signals(self._rank_sync.local.signals):
            try:
                self._train_epochs(epochs)
            except (Exception, KeyboardInterrupt) as error:
                self.log(f"ended by {type(error).__name__}: {error}")
                self._rank_sync.raise_unreported(error)
                raise

    def stop(self) -> None:
        """Ask all ranks to stop after the next summary; one rank is enough (not collective)."""
        self._rank_sync.local.stop = True

    def validate(self) -> dict[str, float]:
        """Return the mean loss ("loss") and metrics over the validation set, on every rank."""
        if self.val_loader is None:
            raise ValueError("there is no validation data: call set_val_loader first")
        return self._means(self.val_loader, self.info.distributed)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss and metrics over `batches`, on this rank alone (not collective)."""
        return self._means(batches, distributed=False)

    def predict(self, dataset: Dataset[Any], batch_size: int) -> Any:
        """Return the model's outputs for `dataset` on rank 0, None elsewhere.

        The model gets the first element of an item that is a tuple or list, else the item itself.

        Args:
            dataset: The data, the same on all ranks.
            batch_size: Samples per rank and batch.

        Returns:
            On rank 0 the outputs in data-set order. Tensor outputs are one tensor on the CPU
            (empty if there are no items). Tuples, dicts and lists are a list with one entry per
            item, which is pickled to reach rank 0: that takes several times the time and memory.

        Raises:
            ValueError: If the model does not return one output per item.
            TypeError: If it returns anything else than the above.
        """
        return self._map(self._unwrapped, dataset, batch_size)

    def log_likelihood(self, dataset: Dataset[Any], batch_size: int) -> Any:
        """Return `model.log_likelihood(inputs)` for `dataset`, in the form that `predict` has."""
        return self._map(_method(self._unwrapped, "log_likelihood"), dataset, batch_size)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Return `model.sample(*args, **kwargs)` on rank 0, None elsewhere; the others wait."""
        sample = _method(self._unwrapped, "sample")
        with evaluating(self._unwrapped, self.info.distributed):
            return self._on_rank_0(lambda: sample(*args, **kwargs))

    def save(self, path: str | Path) -> None:
        """Save a checkpoint, from which a run resumes as if it had never stopped.

        Never call it under `if handler.rank == 0`: rank 0 writes, but all ranks must call.

        Raises:
            OSError: On all ranks, if the file cannot be written.
            FloatingPointError: On all ranks, if a weight is not finite. Nothing is saved then.
        """
        self._rng.start()
        self._sync(leave=False)  # if a callback saves, later callbacks still have to run
        self._write(path)

    def load(self, path: str | Path) -> None:
        """Load the checkpoint `path`, or the newest intact one in the folder `path`.

        An empty or missing folder means to start from scratch. Rank 0 reads the file. At the world
        size that saved, the resumed run equals the uninterrupted one bit for bit on the CPU. At
        another world size, each sample of the epoch that was not seen yet is used once.

        Raises:
            OSError: If the file cannot be read.
            DamagedCheckpoint: If the file, or every checkpoint in the folder, is damaged.
            ValueError: If the checkpoint does not fit this Handler.
        """
        checkpoint = self._on_rank_0(lambda: find(path), broadcast=True)
        if checkpoint is None:
            self.log(f"no checkpoint in {path}: starting from scratch")
            return
        where, state = checkpoint
        parts = self._optimization.parts()
        check_fits(where, state, [name for name, _ in parts], self._identity())
        load_weights(self.model, state["model"])
        for name, part in parts:
            part.load_state_dict(state[name])
        for name in ("epoch", "step", "samples_seen", "history"):
            setattr(self, name, state[name])
        self._data, self.running = state["data"], {}
        self._optimization.skipped = state["skipped"]
        self._load_ranks(state["ranks"])
        self.log(f"{where}: epoch {self.epoch}, step {self.step}")

    def plot_losses(self, path: str | Path) -> None:
        """Plot the losses of each epoch on rank 0; the other ranks wait.

        Args:
            path: The file to write. Its suffix is the format.

        Raises:
            ValueError: If no epoch has ended yet, or matplotlib does not know the format.
            ImportError: If matplotlib is not installed.
            OSError: If the file cannot be written.
        """
        self._on_rank_0(lambda: plot_losses(self.history, path))

    def plot_metrics(self, path: str | Path) -> None:
        """Plot the metrics of each epoch, one panel per metric, as `plot_losses` does."""
        self._on_rank_0(lambda: plot_metrics(self.history, list(self.metrics), path))

    def log(self, text: str) -> None:
        """Log a line on rank 0, also into the run folder's log.txt (not collective)."""
        if self.rank == 0:
            logger.info(text)
            if self._run_folder:
                self._run_folder.log(logger.name, text)

    # Training

    def _begin(self) -> None:
        self._rng.start()
        self._rank_sync = RankSync(self.info.distributed)
        self._stopping = self._signalled = False
        if self._save_folder() is None:
            self.log("no Checkpoint callback and no run_dir: a signal will end training unsaved")

    def _train_epochs(self, epochs: int) -> None:
        self._call("on_train_start")
        self._sync()
        while self.epoch < epochs and not self._stopping:
            self._train_epoch()
        self._call("on_train_end")
        self._sync()

    def _train_epoch(self) -> None:
        self._begin_epoch()
        self._call("on_epoch_start")
        self.model.train()
        for window in self._windows():
            self._train_step(window)
            self._call("on_step_end")
            self._apply()
            if self._stopping:
                return
            if self.step % self.sync_every == 0:
                self._rank_sync.start(self._sums)
        if not self.samples_seen:
            raise ValueError("the training data gave no batch: an epoch must have at least one")
        self._sync()
        self._end_epoch()

    def _begin_epoch(self) -> None:
        assert self.train_loader is not None
        data = data_fingerprint(self.train_loader, self.info.world_size)
        if self.samples_seen:
            check_same_data(self._data, data)
        if self.samples_seen and not order_is_reproducible(self.train_loader):
            warnings.warn(
                f"epoch {self.epoch + 1} starts again, because the sampler cannot repeat its "
                "order: give it a set_epoch(epoch) that decides the order",
                stacklevel=4,
            )
            self.samples_seen, self._sums = 0, self.loss_and_metrics.new_sums()
        self._data = data
        seek(self.train_loader, self.epoch, self.samples_seen, self.rank)
        if self.samples_seen == 0:
            self._rng.restore()
            self.running = {}

    def _windows(self) -> Iterator[list[Any]]:
        """Yield the batches of each remaining optimizer step of the epoch."""
        assert self.train_loader is not None
        if self.samples_seen:
            self._rng.capture()  # skipping batches may draw random numbers
        batches = batches_from(self.train_loader, self.samples_seen)
        self._rng.restore()  # after iter(loader), which may draw a seed
        while window := list(islice(batches, self.accumulate)):
            yield window

    def _train_step(self, window: list[Any]) -> None:
        """Take one optimizer step with the mean over the samples of all batches in `window`."""
        counts = [samples_in(pair(batch)[1]) for batch in window]
        total = sum(counts)
        if not all(counts):
            raise ValueError("a batch has no samples: make the collate_fn keep at least one")
        if not self._warmed_up:
            warm_up_ddp_buckets(
                self.model, lambda: self.loss_and_metrics.loss(self.model, window[0]), self.device
            )
            self._warmed_up = True
        buffers = copied_buffers(self._unwrapped) if self._optimization.skip_nonfinite else []
        parts = []
        self.optimizer.zero_grad()
        for number, (batch, count) in enumerate(zip(window, counts, strict=True), start=1):
            with gradient_sync(self.model, enabled=number == len(window)):
                loss, values = self.loss_and_metrics(self.model, batch)
                parts.append((count, self._sums.means(values)))
                share = loss if count == total else loss * (count / total)  # sizes may differ
                self._optimization.backward(share)
        taken = self._optimization.step()
        # A step that was not meant to be skipped must report its loss, finite or not.
        if taken or not self._optimization.skip_nonfinite:
            for count, means in parts:
                self._sums.add(count, means)
        else:
            restore_buffers(self._unwrapped, buffers)
        self.step += 1
        assert self.train_loader is not None
        self.samples_seen = samples_seen_after(self.train_loader, self.samples_seen, len(window))

    def _end_epoch(self) -> None:
        if not self._optimization.skip_nonfinite:
            self._check_weights()
        values = {f"train_{name}": value for name, value in self.running.items()}
        if self.val_loader is not None:
            values |= {f"val_{name}": value for name, value in self.validate().items()}
        self._record(values)
        self._optimization.end_epoch(values.get("val_loss", values["train_loss"]))
        self.epoch, self.samples_seen = self.epoch + 1, 0
        self._sums = self.loss_and_metrics.new_sums()
        self._log_epoch(values)
        self._call("on_epoch_end")
        self._sync()

    def _record(self, values: Mapping[str, float]) -> None:
        """Append an epoch's values to the history, and NaN to a validation list without a value."""
        missed = [f"val_{name}" for name in self._sums.names if f"val_{name}" in self.history]
        for name in [*values, *(name for name in missed if name not in values)]:
            column = self.history.setdefault(name, [])
            column += [math.nan] * (self.epoch - len(column))
            column.append(values.get(name, math.nan))

    def _check_weights(self) -> None:
        """Raise FloatingPointError if a weight is not finite, though no loss has shown it yet."""
        if not all(torch.isfinite(part).all() for part in self._unwrapped.parameters()):
            raise FloatingPointError(
                f"the weights are not finite at the end of epoch {self.epoch + 1}: {NONFINITE}"
            )

    # Decisions

    def _call(self, hook: str) -> None:
        self._rank_sync.call(self.callbacks, hook)
        if self._signalled:  # a callback saved, and that summary had the signal
            self._sync()

    def _sync(self, leave: bool = True) -> None:
        """Finish the pending summary, then make one more at once, and act on both (collective)."""
        self._apply(leave)
        self._rank_sync.start(self._sums)
        self._apply(leave)

    def _apply(self, leave: bool = True) -> None:
        """Act on the pending summary, if there is one. All ranks do the same (collective)."""
        summary = self._rank_sync.finish()
        if summary is None:
            return
        nonfinite = summary.nonfinite and not self._optimization.skip_nonfinite
        if nonfinite or summary.signalled:
            # Training ends here. An error that a callback raised after the summary started wins.
            self._rank_sync.start(self._sums)
            self._rank_sync.finish()
        if nonfinite:
            with self._rank_sync.fatal_errors():
                raise FloatingPointError(
                    f"a loss of epoch {self.epoch + 1} is not finite, noticed at step {self.step}: "
                    f"{NONFINITE}"
                )
        self._stopping = self._stopping or summary.stop
        if self.samples_seen:  # before the first step, there are no means
            self.running = summary.means
        self._signalled = self._signalled or summary.signalled
        if self._signalled and leave:
            self._save_and_leave()

    def _save_and_leave(self) -> None:
        """Save a checkpoint of this step on all ranks, then exit."""
        if folder := self._save_folder():
            self._write(folder / NAME.format(self.step))
        self.log(f"ended by a signal at step {self.step}")
        raise SystemExit(EXIT_CODE)

    def _save_folder(self) -> Path | None:
        folders = [c.folder for c in self.callbacks if isinstance(c, Checkpoint)]
        return folders[0] if folders else None

    # Checkpoints

    def _write(self, path: str | Path) -> None:
        with self._rank_sync.fatal_errors():
            own = (self._rng.state(), self._sums.state())
            ranks = gather_objects(own) if self.info.distributed else [own]
            self._on_rank_0(lambda: write(path, self._state(ranks or [])))

    def _state(self, ranks: list[tuple[dict[str, Any], Tensor]]) -> dict[str, Any]:
        check_finite(self._unwrapped)
        names = ("epoch", "step", "samples_seen", "history", "skipped")
        return {
            "model": weights(self.model),
            "ranks": [{"generators": state, "sums": sums} for state, sums in ranks],
            "data": self._data,
            **self._identity(),
            **{name: getattr(self, name) for name in names},
            **{name: part.state_dict() for name, part in self._optimization.parts()},
        }

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the Handler that loads it must share."""
        return {
            "seed": self.seed,
            "metrics": list(self.metrics),
            "optimizer_type": type(self.optimizer).__name__,
        }

    def _load_ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Load this rank's random state and sums; at another world size a share of the sums."""
        self._sums = self.loss_and_metrics.new_sums()
        if len(ranks) == self.info.world_size:
            self._warmed_up = self.step == 0
            self._rng.load(ranks[self.rank]["generators"], self.step)
        else:
            self._rng.load(None, self.step)
        for past in ranks[self.rank :: self.info.world_size]:
            self._sums.add_state(past["sums"])

    def _means(self, batches: Iterable[Any], distributed: bool) -> dict[str, float]:
        context = self._rank_sync.fatal_errors() if distributed else nullcontext()
        with context, evaluating(self._unwrapped, distributed):
            return self.loss_and_metrics.over(self._unwrapped, batches).summary(distributed).means

    def _map(self, function: Callable[[Any], Any], dataset: Dataset[Any], batch_size: int) -> Any:
        batches = self._shard(dataset, batch_size)
        distributed = self.info.distributed
        with (
            self._rank_sync.fatal_errors(),
            evaluating(self._unwrapped, distributed),
            self.loss_and_metrics.autocast(),
        ):
            return outputs_in_order(function, batches, self.device, distributed)

    def _shard(self, dataset: Dataset[Any], batch_size: int, **loader: Any) -> DataLoader[Any]:
        self._check_same(items=_length(dataset))
        world_size = self.info.world_size
        return shard_loader(dataset, batch_size, rank=self.rank, world_size=world_size, **loader)

    # Helpers

    def _check_same(self, **lengths: int) -> None:
        if self.info.distributed:
            check_same(self.device, **lengths)

    def _all_callbacks(
        self, callbacks: Sequence[Callback], run_dir: str | Path | None
    ) -> list[Callback]:
        """Return the user's callbacks and ours, which come last to see what the others changed."""
        ordered = list(callbacks)
        if run_dir is not None and not any(isinstance(c, Checkpoint) for c in ordered):
            ordered.append(Checkpoint(run_dir))
        if self._run_folder:
            ordered.append(self._run_folder)
        if self.rank == 0 and sys.stderr is not None and sys.stderr.isatty():
            ordered.insert(0, ProgressBar())
        for callback in ordered:
            callback.handler = self
        return ordered

    def _on_rank_0(self, work: Callable[[], R], broadcast: bool = False) -> R | None:
        return on_rank(0, broadcast=broadcast)(work)() if self.info.distributed else work()

    def _log_epoch(self, values: Mapping[str, float]) -> None:
        text = " | ".join(f"{name} {value:.4g}" for name, value in values.items())
        skipped = f" | {self.skipped} steps skipped" if self.skipped else ""
        self.log(f"epoch {self.epoch} | {text}{skipped}")


def _method(model: nn.Module, name: str) -> Callable[..., Any]:
    method = getattr(model, name, None)
    if method is None:
        raise ValueError(
            f"Handler.{name} needs a method {name} of the model: add it to {type(model).__name__}"
        )
    return method


def _length(data: Any) -> int:
    """Return the length, or -1 if there is none."""
    try:
        return len(data)
    except TypeError:
        return -1
