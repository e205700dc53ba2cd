"""Handler: train a model on one process or on many with the same code.

This file is wiring. The training loop is in training/loop.py.
"""

import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .decorators import on_rank
from .initialize import _resolve_device, initialize_ddp
from .training import checkpoint, settings
from .training.callbacks import Callback, Checkpoint
from .training.data import TrainBatches, eval_loader, train_loader
from .training.evaluation import evaluate, outputs_in_order
from .training.loop import Signalled, TrainLoop
from .training.loss_and_metrics import Count, Forward, LossAndMetrics, LossFunction
from .training.model import evaluating, move_and_wrap, unwrap_model, use_device
from .training.rank_sync import check_same
from .training.run_folder import RunFolder
from .training.train_state import RngState, TrainState

logger = logging.getLogger(__name__)
R = TypeVar("R")
SET_BY_SCHEDULER = {"lr", "initial_lr"}  # what a scheduler sets in the optimizer's groups
CHANGE_LR = "after the load, multiply each group's lr and the scheduler's base_lrs by one factor"
FORMAT = 3  # of a checkpoint; another version's has none, or another number


class Handler:
    """Train, evaluate and save a model on every rank of the launch, or on this process alone.

    The constructor and all methods are collective, so all ranks call them, except `stop`,
    `evaluate` and `log`. SIGTERM or SIGUSR1 ends training, with a checkpoint if there is a folder
    for checkpoints.

    Args:
        model: The model, not wrapped in DDP.
        optimizer: An optimizer of the model's parameters.
        loss_fn: `loss_fn(outputs, targets)`, a mean over samples.
        forward: How to run the model on a batch: `forward(model, batch)` returns outputs, targets.
            Default: a batch is `(inputs, targets)`.
        count: `count(batch)` returns how many samples or tokens the loss and metrics of a batch are
            averaged over: a number, or a 0-dimensional tensor, such as a sum of class weights. It
            gets the batch as loaded, on the CPU. Gradients are then means over all counted samples
            of all ranks, even if the counts differ. For a count of 0 the loss must still have
            finite gradients. Default: the first dimension of the targets (of the first tensor, or
            `num_graphs`, in a batch that is no pair), which should be the same on all ranks.
        metrics: By name, functions called like `loss_fn`, each a mean over samples, or objects with
            `update(outputs, targets)`, `compute()` and `reset()`, such as those of torchmetrics.
            `compute` is called once per epoch, returns one number and reduces over ranks itself.
            Objects of torchmetrics that collect lists need at least one sample per rank. To resume
            within an epoch, objects need `state_dict` and `load_state_dict`, and the same number
            of ranks.
        scheduler: A scheduler that steps once per epoch, or `(scheduler, "step")` for one that
            steps after each optimizer step. ReduceLROnPlateau gets the validation loss (without
            validation, the training loss), or with `(scheduler, "val_accuracy")` that value.
        callbacks: Hooks that run during training, in this order, but a Checkpoint after all others.
        device: Where to train; None for the device that `initialize_ddp` chose.
        use_distributed: False for this process alone, True to require a distributed launch, None
            to find out from the environment.
        accumulate: Batches per optimizer step.
        clip_norm: Upper bound for the norm of the gradients.
        precision: "fp32", "bf16" or "fp16".
        on_nonfinite: "raise" ends training with FloatingPointError if a loss is not finite. "skip"
            leaves out steps with non-finite gradients. With fp16, steps whose gradients overflow
            are always left out.
        sync_every: Optimizer steps between two summaries, in which the ranks share losses and
            signals. A summary overlaps the next step, so no rank waits for it.
        seed: Seeds the data order and, together with the rank, dropout.
        run_dir: A folder for this run's configuration, log, history and figures, and for a
            checkpoint per epoch, unless `callbacks` has a Checkpoint with its own folder.
        ddp_options: Keywords of DistributedDataParallel, such as `find_unused_parameters`.
            Buffers that `broadcast_buffers=False` leaves to each rank stay its own in evaluation,
            but checkpoints contain rank 0's.

    Raises:
        ValueError: If a setting is wrong or the device does not support it, or if the optimizer
            has parameters that are not the model's.
        TypeError: If `optimizer` is not an optimizer, or DDP has no such keyword.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        *,
        forward: Forward | None = None,
        count: Count | None = None,
        metrics: Mapping[str, Any] | None = None,
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
        ddp_options: Mapping[str, Any] | None = None,
    ) -> None:
        settings.check_count("accumulate", accumulate)
        settings.check_count("sync_every", sync_every)
        options = dict(ddp_options or {})
        settings.check_optimizer(optimizer, model, clip_norm is not None or on_nonfinite == "skip")
        settings.check_settings(clip_norm, precision, on_nonfinite)
        if options.get("static_graph") and accumulate > 1:
            raise ValueError(
                "static_graph does not work with accumulate above 1: leave out one of the two"
            )
        self.scheduler, unit = settings.scheduler_and_unit(scheduler)
        wanted = None if device is None else _resolve_device(device, stacklevel=3)
        backend = "gloo" if wanted and wanted.type == "cpu" else None
        #: what initialize_ddp returned
        self.info = initialize_ddp(backend=backend, use_distributed=use_distributed)
        self.device = settings.pick_device(wanted, precision, self.info)
        self.optimizer = optimizer  #: the optimizer that was given
        self.metrics = dict(metrics or {})
        self.accumulate, self.sync_every, self.seed = accumulate, sync_every, operator.index(seed)
        self.clip_norm, self.precision, self.on_nonfinite = clip_norm, precision, on_nonfinite
        distributed = self.info.distributed
        self._forward = forward
        self._run_folder = None if run_dir is None else RunFolder(run_dir)
        self.callbacks = self._all_callbacks(callbacks, run_dir)
        self._rng = RngState(self.seed, self.rank, self.device)
        self._val_loader: DataLoader[Any] | None = None
        wrapped = move_and_wrap(model, self.device, options, distributed)
        if optimizer.state:  # Adagrad creates its state early, on the CPU: move it as well
            optimizer.load_state_dict(optimizer.state_dict())
        self.loop = TrainLoop(
            wrapped,
            optimizer,
            LossAndMetrics(
                loss_fn, self.metrics, forward, count, self.device, settings.PRECISIONS[precision]
            ),
            self.callbacks,
            self._rng,
            scheduler=self.scheduler,
            scheduler_unit=unit,
            scaler=torch.amp.GradScaler(self.device.type, enabled=precision == "fp16"),
            clip_norm=clip_norm,
            skip_nonfinite=on_nonfinite == "skip",
            sync_every=sync_every,
            distributed=distributed,
            log=self.log,
            state=TrainState(settings=settings.group_settings(optimizer)),
        )

    # Data

    def set_train_loader(
        self,
        data: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        steps_per_epoch: int | None = None,
        **loader: Any,
    ) -> None:
        """Set the training data.

        Args:
            data: A data set, the same on all ranks; an existing DataLoader, which is rebuilt with
                a sampler that gives this rank its own samples, in an order that depends on
                this Handler's `seed`; or an IterableDataset that gives each rank its own samples.
            batch_size: Samples per rank and batch. Default: the existing loader's.
            steps_per_epoch: Optimizer steps per epoch, for an IterableDataset, or for a batch
                sampler without a length. The next epoch continues the stream. It restarts when it
                ends and at each call of `train`.
            **loader: Anything else that DataLoader takes. `pin_memory` defaults to True on a GPU:
                pass False for data that is on the GPU already.

        Raises:
            ValueError: If an option is wrong, or the length of the data differs between ranks.
        """
        made = self._loader(train_loader, data, batch_size, seed=self.seed, **loader)
        seed_and_rank = {"seed": self.seed, "rank": self.rank, "world_size": self.info.world_size}
        self.loop.batches = TrainBatches(made, steps_per_epoch, self.accumulate, **seed_and_rank)

    def set_val_loader(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None, **loader: Any
    ) -> None:
        """Set the validation data. Each item is used exactly once, on one of the ranks.

        Args:
            data: A data set, the same on all ranks, or an existing DataLoader of one.
            batch_size: Samples per rank and batch. Default: the existing loader's.
            **loader: Anything else that DataLoader takes, except shuffling and samplers.

        Raises:
            ValueError: If an option is wrong, or the length differs between ranks.
        """
        self._val_loader = self._eval_loader(data, batch_size, **loader)

    @property
    def train_loader(self) -> DataLoader[Any] | None:
        """This rank's training loader. Assigning a loader calls `set_train_loader(loader)`."""
        return self.loop.batches.loader if self.loop.batches else None

    @train_loader.setter
    def train_loader(self, loader: DataLoader[Any]) -> None:
        self.set_train_loader(loader)

    @property
    def val_loader(self) -> DataLoader[Any] | None:
        """This rank's validation loader. Assigning a loader calls `set_val_loader(loader)`."""
        return self._val_loader

    @val_loader.setter
    def val_loader(self, loader: DataLoader[Any] | None) -> None:
        self._val_loader = None if loader is None else self._eval_loader(loader)

    # Training and evaluation

    def train(self, epochs: int, max_steps: int | None = None) -> None:
        """Train until `epochs` epochs have ended in total: after `load`, only the missing ones.

        If there is a folder for checkpoints, `train` first saves one there and deletes it, so
        that a checkpoint that cannot be saved is an error before training.

        Args:
            epochs: How many epochs there are in total, including those before `load`.
            max_steps: Stop after this many optimizer steps in total, also within an epoch. With its
                last step, an epoch ends as usual.

        Raises:
            ValueError: If there is no training data, or an epoch has no batch.
            TypeError: On all ranks, if a checkpoint cannot contain the state of some part.
            FloatingPointError: On all ranks, if a loss is not finite.
            SystemExit: With code 143 on all ranks, after SIGTERM or SIGUSR1 on any rank, once a
                checkpoint is saved.
        """
        if max_steps is not None:
            settings.check_count("max_steps", max_steps)
        if self.loop.batches is None:
            raise ValueError("there is no training data: call set_train_loader first")
        use_device(self.device)
        self._rng.start()
        if self.save_folder is None:
            self.log("no Checkpoint callback and no run_dir: a signal will end training unsaved")
        try:
            self._try_to_save()
            self.loop.train(epochs, max_steps, self._validate_if_set)
        except Signalled:
            if folder := self.save_folder:
                path = folder / checkpoint.NAME.format(self.step)
                self.save(path)
                self.log(f"saved {path}")
            self.log(f"ended by a signal at step {self.step}")
            raise
        except (Exception, KeyboardInterrupt) as error:
            self.log(f"ended by {type(error).__name__}: {error}")
            raise
        finally:
            self.loop.batches.rewind()

    def stop(self) -> None:
        """Ask all ranks to stop after the next summary; one rank is enough (not collective)."""
        self.loop.rank_sync.stop = True

    def validate(self) -> dict[str, float]:
        """Return the mean loss ("loss") and metrics over the validation set, on every rank."""
        if self._val_loader is None:
            raise ValueError("there is no validation data: call set_val_loader first")
        return evaluate(self.model, self.loop.task, self._val_loader, self.info.distributed)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss and metrics over `batches`, on this rank alone (not collective).

        The `compute` of your own metric objects must then not wait for other ranks. Those of
        torchmetrics do not.

        Args:
            batches: Batches as a loader returns them, such as a list of them or a DataLoader.
        """
        return evaluate(self._unwrapped, self.loop.task, batches, distributed=False)

    def predict(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None, **loader: Any
    ) -> Any:
        """Return the model's outputs for `data` on rank 0, None elsewhere.

        Without `forward`, the model gets the first element of a batch that is a tuple or list, else
        the batch itself.

        Args:
            data: A data set, the same on all ranks, or an existing DataLoader of one.
            batch_size: Samples per rank and batch. Default: the existing loader's.
            **loader: Anything else that DataLoader takes, except shuffling and samplers.

        Returns:
            On rank 0 the outputs in data-set order. Tensors become one tensor on the CPU (empty if
            there are no items). Lists, and tuples and dicts of both, become a list with an entry
            per item; pickling it for rank 0 takes several times the time and memory of a tensor.
            Parts without a batch dimension, such as a loss, are left out.

        Raises:
            ValueError: If the model does not return one output per item.
            TypeError: If it returns anything else than the above.
        """
        forward = self._forward

        def outputs(model: nn.Module, batch: Any) -> Any:
            return forward(model, batch)[0] if forward else model(_inputs_of(batch))

        return self._map(outputs, data, batch_size, loader)

    def log_likelihood(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None, **loader: Any
    ) -> Any:
        """Return `model.log_likelihood(inputs)` for `data`, in the same form as `predict`.

        Args:
            data: A data set, the same on all ranks, or an existing DataLoader of one.
            batch_size: Samples per rank and batch. Default: the existing loader's.
            **loader: Anything else that DataLoader takes, except shuffling and samplers.
        """
        method = self._unwrapped.log_likelihood
        return self._map(lambda _, batch: method(_inputs_of(batch)), data, batch_size, loader)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Return `model.sample(*args, **kwargs)` on rank 0, None elsewhere; the others wait.

        Args:
            *args: The arguments of the model's `sample`.
            **kwargs: Its keyword arguments.
        """
        sample = self._unwrapped.sample
        with evaluating(self.model, self.device):
            return self._on_rank_0(lambda: sample(*args, **kwargs))

    # Checkpoints, figures, log

    def save(self, path: str | Path) -> None:
        """Save a checkpoint, from which a run resumes as if it had never stopped.

        Never call it under `if handler.rank == 0`: rank 0 writes, but all ranks must call.

        Args:
            path: The file to write.

        Raises:
            OSError: On all ranks, if the file cannot be written.
            TypeError: On all ranks, if a checkpoint cannot contain the state of some part.
            FloatingPointError: On all ranks, if a weight is not finite. Nothing is saved then.
        """
        self._rng.start()
        state = self.loop.state_dict()

        def write_checked() -> None:
            checkpoint.check_finite(self._unwrapped)
            checkpoint.write(path, state | self._must_match())

        self._on_rank_0(write_checked)

    def load(self, path: str | Path, keep: Sequence[str] = ()) -> None:
        """Load the checkpoint `path`, or the newest intact one in the folder `path`.

        If the folder is empty or missing, the run starts from scratch. Rank 0 chooses the file.
        Ranks that see it read it; the others get its bytes from rank 0. On the CPU, a run resumed
        at the same world size equals the uninterrupted one bit for bit. At another world size, each
        remaining sample of the epoch is used once.

        Args:
            path: A checkpoint, or a folder of checkpoints such as `run_dir`. Or a file with the
                model's state dict, with or without DDP's `module.` prefixes, perhaps as "model" in
                a dict: this loads only the weights.
            keep: Settings of the optimizer, such as ("lr", "weight_decay"), for which this
                Handler's values stay. All others come from the checkpoint, with a warning if this
                run was started with other values than the saved run.

        Raises:
            OSError: If the file cannot be read.
            DamagedCheckpoint: If the file, or every checkpoint in the folder, is damaged.
            RuntimeError: If the names or shapes of the weights are not those of the model.
            ValueError: If the checkpoint does not fit this Handler, or `keep` has "lr" although
                there is a scheduler, which sets it.
        """
        names = {name for group in self.optimizer.param_groups for name in group} - {"params"}
        if isinstance(keep, str) or not names >= {*keep}:
            raise ValueError(f"keep must be a list of {', '.join(sorted(names))}, not {keep!r}")
        if self.scheduler and not SET_BY_SCHEDULER.isdisjoint(keep):
            raise ValueError(f"keep has lr, but the scheduler sets it: {CHANGE_LR}")
        find = checkpoint.find_on_all_ranks if self.info.distributed else checkpoint.find
        if (latest := find(path)) is None:
            self.log(f"no checkpoint in {path}: starting from scratch")
            return
        file, saved = latest[:2]
        if saved.keys().isdisjoint(("ranks", "samples_seen")):
            checkpoint.load_weights(self.model, checkpoint.weights_in(file, saved))
            self.log(f"{file} is not from Handler.save: taking its weights only")
            return
        checkpoint.check_fits(file, saved, self._must_match())
        for change in self._resume_warnings(saved, keep) if self.rank == 0 else ():
            warnings.warn(f"{file} was saved {change}", stacklevel=2)
        own = settings.group_settings(self.optimizer)
        self.loop.load_state_dict(saved, self.rank, self.info.world_size)
        groups = zip(self.optimizer.param_groups, self.loop.state.settings, own, strict=True)
        for group, started_with, before in groups:
            kept = {name: before[name] for name in keep if name in before}
            group.update(kept)
            started_with.update(kept)
        if self.loop.batches:
            self.loop.batches.rewind()
        self.log(f"loaded {file}: epoch {self.epoch}, step {self.step}")

    def plot_losses(self, path: str | Path) -> None:
        """Plot the losses of each epoch on rank 0; the other ranks wait.

        Args:
            path: The file to write. Its suffix is the format.

        Raises:
            ValueError: If no epoch has ended yet, or matplotlib does not know the format.
            ImportError: If matplotlib is not installed.
            OSError: If the file cannot be written.
        """
        from .figures import plot_losses

        self._on_rank_0(lambda: plot_losses(self.history, path))

    def plot_metrics(self, path: str | Path) -> None:
        """Plot the metrics of each epoch, one panel per metric, as `plot_losses` does.

        Args:
            path: The file to write. Its suffix is the format.
        """
        from .figures import plot_metrics

        self._on_rank_0(lambda: plot_metrics(self.history, list(self.metrics), path))

    def log(self, text: str) -> None:
        """Log a line on rank 0, also into the run folder's log.txt (not collective).

        Args:
            text: The line.
        """
        if self.rank == 0:
            logger.info(text)
            if self._run_folder:
                self._run_folder.log(logger.name, text)

    # What callbacks and users read

    @property
    def model(self) -> nn.Module:
        """The model, wrapped in DDP if there are other ranks."""
        return self.loop.model

    @property
    def epoch(self) -> int:
        """How many epochs have ended."""
        return self.loop.state.epoch

    @property
    def step(self) -> int:
        """How many optimizer steps there were in all epochs, including skipped ones."""
        return self.loop.state.step

    @property
    def samples_seen(self) -> int:
        """How many samples all ranks together have drawn in this epoch."""
        return self.loop.state.samples_seen

    @property
    def history(self) -> dict[str, list[float]]:
        """Each epoch's values, such as "train_loss" and "val_loss"."""
        return self.loop.state.history

    @property
    def running(self) -> dict[str, float]:
        """This epoch's means in the latest summary; {} before it."""
        return self.loop.running

    @property
    def _unwrapped(self) -> Any:  # for all but training: DDP's forward may be collective
        return unwrap_model(self.model)

    @property
    def rank(self) -> int:
        """This process's rank; 0 if it is alone."""
        return self.info.rank

    @property
    def skipped(self) -> int:
        """How many optimizer steps were skipped because their gradients were not finite."""
        return self.loop.state.skipped

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
        """Each metric's value over the training samples of each epoch."""
        return {name: self.history.get(f"train_{name}", []) for name in self.metrics}

    @property
    def val_metrics(self) -> dict[str, list[float]]:
        """Each metric's value over the validation samples of each epoch."""
        return {name: self.history.get(f"val_{name}", []) for name in self.metrics}

    @property
    def steps_left(self) -> int | None:
        """How many optimizer steps the epoch has left; None if the data has no length."""
        return self.loop.batches.steps_left(self.samples_seen) if self.loop.batches else None

    @property
    def save_folder(self) -> Path | None:
        """Where a signal saves: the folder of the last Checkpoint; None without one."""
        return next((c.folder for c in self.callbacks[::-1] if isinstance(c, Checkpoint)), None)

    # Wiring

    def _all_callbacks(
        self, callbacks: Sequence[Callback], run_dir: str | Path | None
    ) -> list[Callback]:
        """Return the user's callbacks and ours, which come last to see what the others changed.

        A Checkpoint comes after all other callbacks of the user's: a resumed run does not call
        their hooks again, so what these draw and change must be in the file.
        """
        ordered = sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))
        if run_dir is not None and not any(isinstance(c, Checkpoint) for c in ordered):
            ordered.append(Checkpoint(run_dir))
        if self._run_folder:
            ordered.append(self._run_folder)
        for callback in ordered:
            callback.handler = self
        return ordered

    def _validate_if_set(self) -> dict[str, float]:
        return {} if self._val_loader is None else self.validate()

    def _map(self, function: Any, data: Any, batch_size: int | None, loader: Any) -> Any:
        batches = self._eval_loader(data, batch_size, **loader)
        task, distributed = self.loop.task, self.info.distributed
        return outputs_in_order(function, self.model, task, batches, distributed)

    def _eval_loader(self, data: Any, batch_size: int | None = None, **loader: Any) -> Any:
        made = self._loader(eval_loader, data, batch_size, **loader)
        check_same(self.info.distributed, items=len(made.dataset))
        return made

    def _loader(self, make: Any, data: Any, batch_size: int | None, **options: Any) -> Any:
        """Make this rank's loader, with `train_loader` or `eval_loader`."""
        if self.device.type == "cuda" and not isinstance(data, DataLoader):
            options.setdefault("pin_memory", True)
        return make(data, batch_size, rank=self.rank, world_size=self.info.world_size, **options)

    def _on_rank_0(self, work: Callable[[], R]) -> R | None:
        return on_rank(0)(work)() if self.info.distributed else work()

    # Checkpoints

    def _must_match(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the Handler that loads it must share."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "metrics": list(self.metrics),
            "parts": {name: type(part).__name__ for name, part in self.loop.parts.items()},
            "scheduler_steps_per": "step" if self.loop.scheduler_unit == "step" else "epoch",
        }

    def _try_to_save(self) -> None:
        """Save a checkpoint where training will save them, and delete it."""
        if folder := self.save_folder:
            self.save(path := folder / ".before_training.pt")
            if self.rank == 0:
                path.unlink()

    def _resume_warnings(self, saved: dict[str, Any], keep: Sequence[str]) -> list[str]:
        """Return a line per group whose settings `saved` replaces, and one if the ranks changed."""
        changes = []
        for own, theirs in zip(self.loop.state.settings, saved["settings"], strict=False):
            changed = [n for n in own if n not in keep and own[n] != theirs.get(n)]
            before = ", ".join(f"{name}={theirs.get(name)}" for name in changed)
            now = ", ".join(f"{name}={own[name]}" for name in changed)
            free = [n for n in changed if not (self.scheduler and n in SET_BY_SCHEDULER)]
            if changed:
                advice = f"pass keep={free} to keep yours" if free else CHANGE_LR
                changes.append(f"with {before}, which replaces {now}: {advice}")
        ranks, world_size = len(saved["ranks"]), self.info.world_size
        if self.loop.scheduler_unit == "step" and ranks != world_size:
            changes.append(
                f"by {ranks} ranks, and {world_size} ranks take another number of steps per epoch: "
                "a scheduler that counts steps now ends at another epoch: plan it again, or use "
                f"{ranks} ranks"
            )
        return changes


def _inputs_of(batch: Any) -> Any:
    """Return the model's inputs: the first element of a tuple or list, else the batch itself."""
    return batch[0] if isinstance(batch, list | tuple) and batch else batch
