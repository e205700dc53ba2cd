"""Handler: train a model on one process or on many with the same code.

This file is wiring. The training loop is in training/loop.py.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .decorators import on_rank
from .initialize import _resolve_device, initialize_ddp
from .training import train_state
from .training.batches import inputs_of, use_device
from .training.callbacks import Callback, Checkpoint, ProgressBar
from .training.checkpoint import check_finite, find, find_on_all_ranks, write
from .training.checks import check_count, check_same, raise_on_all_ranks
from .training.data import TrainBatches, eval_loader, train_loader
from .training.ddp_model import move_and_wrap, unwrap_model
from .training.evaluation import evaluate, evaluating, outputs_in_order
from .training.loop import TrainLoop
from .training.loss_and_metrics import Count, Forward, LossAndMetrics, LossFunction
from .training.optimizer_step import OptimizerStep, check_optimizer, move_optimizer_state
from .training.run_folder import RunFolder, plot

logger = logging.getLogger(__name__)
R = TypeVar("R")


class Handler:
    """Train, evaluate and save a model on every rank of the launch, or on this process alone.

    The constructor and all methods are collective, so all ranks call them, except `stop`,
    `evaluate` and `log`. A signal (SIGTERM or SIGUSR1) ends training with a checkpoint.

    Args:
        model: The model, not wrapped in DDP.
        optimizer: An optimizer of the model's parameters.
        loss_fn: `loss_fn(outputs, targets)`, a mean over samples.
        forward: How to run the model on a batch: `forward(model, batch)` returns outputs, targets.
            Default: a batch is `(inputs, targets)`.
        count: `count(batch)` returns how many samples or tokens the loss and metrics of a batch are
            averaged over, as an integer or a 0-dimensional tensor. It gets the batch as loaded, on
            the CPU. Gradients are then means over all counted samples of all ranks, even if the
            counts differ. For a count of 0 the loss must still have finite gradients. Default: the
            number of samples, which should be the same on all ranks.
        metrics: By name, functions called like `loss_fn`, each a mean over samples, or objects with
            `update(outputs, targets)`, `compute()` and `reset()`, such as those of torchmetrics.
            `compute` is called once per epoch, returns one number and reduces over ranks itself.
            Objects of torchmetrics that collect lists need at least one sample per rank. To resume
            within an epoch, objects need `state_dict` and `load_state_dict`, and the same number
            of ranks.
        scheduler: A scheduler that steps once per epoch, or `(scheduler, "step")` for one that
            steps after each optimizer step.
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
            Even with `broadcast_buffers=False`, evaluation uses rank 0's buffers on all ranks, and
            checkpoints contain rank 0's buffers.

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
        check_count("accumulate", accumulate)
        check_count("sync_every", sync_every)
        check_optimizer(optimizer, model)
        wanted = None if device is None else _resolve_device(device, stacklevel=3)
        backend = "gloo" if wanted and wanted.type == "cpu" else None
        #: what initialize_ddp returned
        self.info = initialize_ddp(backend=backend, use_distributed=use_distributed)
        self.device = self._pick_device(wanted)
        self.optimizer = optimizer  #: the optimizer that was given
        self.metrics = dict(metrics or {})
        self.accumulate, self.sync_every, self.seed = accumulate, sync_every, seed
        self.clip_norm, self.precision, self.on_nonfinite = clip_norm, precision, on_nonfinite
        distributed = self.info.distributed
        self.optimizer_step = OptimizerStep(self, scheduler)
        self.scheduler = self.optimizer_step.scheduler
        self.loss_and_metrics = LossAndMetrics(self, loss_fn, forward, count)
        self._forward = forward
        #: the model, wrapped in DDP if there are other ranks
        self.model = move_and_wrap(model, self.device, ddp_options or {}, distributed)
        # For everything but training, because a forward pass of DDP may be collective.
        self._unwrapped = unwrap_model(self.model)
        move_optimizer_state(optimizer)
        self.state = train_state.TrainState(self.loss_and_metrics.new_sums(distributed))
        self.rng = train_state.RngState(seed, self.rank, self.device)
        self._run_folder = None if run_dir is None or self.rank else RunFolder(run_dir)
        self.callbacks = self._all_callbacks(callbacks, run_dir)
        self.loop = TrainLoop(self)
        self.train_batches: TrainBatches | None = None
        self._val_loader: DataLoader[Any] | None = None

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
        self.train_batches = TrainBatches(made, self, steps_per_epoch)

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
        self._val_loader = self._shard(data, batch_size, **loader)

    @property
    def train_loader(self) -> DataLoader[Any] | None:
        """This rank's training loader. Assigning a loader calls `set_train_loader(loader)`."""
        return self.train_batches.loader if self.train_batches else None

    @train_loader.setter
    def train_loader(self, loader: DataLoader[Any]) -> None:
        self.set_train_loader(loader)

    @property
    def val_loader(self) -> DataLoader[Any] | None:
        """This rank's validation loader. Assigning a loader calls `set_val_loader(loader)`."""
        return self._val_loader

    @val_loader.setter
    def val_loader(self, loader: DataLoader[Any] | None) -> None:
        self._val_loader = None if loader is None else self._shard(loader)

    # Training and evaluation

    def train(self, epochs: int) -> None:
        """Train until `epochs` epochs have ended in total: after `load`, only the missing ones.

        Args:
            epochs: How many epochs there are in total, with those before `load`.

        Raises:
            ValueError: If there is no training data, or an epoch has no batch.
            FloatingPointError: On all ranks, if a loss is not finite.
            SystemExit: With code 143 on all ranks, after SIGTERM or SIGUSR1 on any rank, once a
                checkpoint is saved.
        """
        if self.train_batches is None:
            raise ValueError("there is no training data: call set_train_loader first")
        if self.save_folder is None:
            self.log("no Checkpoint callback and no run_dir: a signal will end training unsaved")
        self.rng.start()
        try:
            self.loop.train(epochs)
        except (Exception, KeyboardInterrupt) as error:
            self.log(f"ended by {type(error).__name__}: {error}")
            raise
        finally:
            self.train_batches.rewind()

    def stop(self) -> None:
        """Ask all ranks to stop after the next summary; one rank is enough (not collective)."""
        self.loop.rank_sync.stop = True

    def validate(self) -> dict[str, float]:
        """Return the mean loss ("loss") and metrics over the validation set, on every rank."""
        if self._val_loader is None:
            raise ValueError("there is no validation data: call set_val_loader first")
        model, measure = self._unwrapped, self.loss_and_metrics
        return evaluate(model, measure, self._val_loader, self.info.distributed)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss and metrics over `batches`, on this rank alone (not collective).

        The `compute` of your own metric objects must then not wait for other ranks. Those of
        torchmetrics do not.

        Args:
            batches: Batches as a loader returns them, such as a list of them or a DataLoader.
        """
        return evaluate(self._unwrapped, self.loss_and_metrics, batches, distributed=False)

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
            there are no items). Tuples, dicts, dataclasses and lists become a list with one entry
            per item; pickling it for rank 0 takes several times the time and memory of a tensor.
            Parts without a batch dimension, such as a loss, are left out.

        Raises:
            ValueError: If the model does not return one output per item.
            TypeError: If it returns anything else than the above.
        """
        model, forward = self._unwrapped, self._forward

        def outputs(batch: Any) -> Any:
            return forward(model, batch)[0] if forward else model(inputs_of(batch))

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
        method = self._method("log_likelihood")
        return self._map(lambda batch: method(inputs_of(batch)), data, batch_size, loader)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Return `model.sample(*args, **kwargs)` on rank 0, None elsewhere; the others wait.

        Args:
            *args: The arguments of the model's `sample`.
            **kwargs: Its keyword arguments.
        """
        sample = self._method("sample")
        with evaluating(self._unwrapped, self.device, self.info.distributed):
            return self._on_rank_0(lambda: sample(*args, **kwargs))

    # Checkpoints, figures, log

    def save(self, path: str | Path) -> None:
        """Save a checkpoint, from which a run resumes as if it had never stopped.

        Never call it under `if handler.rank == 0`: rank 0 writes, but all ranks must call.

        Args:
            path: The file to write.

        Raises:
            OSError: On all ranks, if the file cannot be written.
            FloatingPointError: On all ranks, if a weight is not finite. Nothing is saved then.
        """
        self.rng.start()
        state = train_state.capture(self)

        def write_checked() -> None:
            check_finite(self._unwrapped)
            write(path, state or {})

        self._on_rank_0(write_checked)

    def load(self, path: str | Path) -> None:
        """Load the checkpoint `path`, or the newest intact one in the folder `path`.

        If the folder is empty or missing, the run starts from scratch. Rank 0 chooses the file.
        Ranks that see it read it; the others get its bytes from rank 0. On the CPU, a run resumed
        at the same world size equals the uninterrupted one bit for bit. At another world size, each
        remaining sample of the epoch is used once.

        Args:
            path: A checkpoint, or a folder of checkpoints such as `run_dir`. Or a file with the
                model's state dict, with or without DDP's `module.` prefixes, or a dict with "model"
                and "optimizer": this loads only the weights and the optimizer's state.

        Raises:
            OSError: If the file cannot be read.
            DamagedCheckpoint: If the file, or every checkpoint in the folder, is damaged.
            ValueError: If the checkpoint does not fit this Handler.
        """
        checkpoint = find_on_all_ranks(path) if self.info.distributed else find(path)
        if checkpoint is None:
            self.log(f"no checkpoint in {path}: starting from scratch")
            return
        train_state.restore(self, *checkpoint[:2])
        if self.train_batches:
            self.train_batches.rewind()
        self.log(f"loaded {checkpoint[0]}: epoch {self.epoch}, step {self.step}")

    def plot_losses(self, path: str | Path) -> None:
        """Plot the losses of each epoch on rank 0; the other ranks wait.

        Args:
            path: The file to write. Its suffix is the format.

        Raises:
            ValueError: If no epoch has ended yet, or matplotlib does not know the format.
            ImportError: If matplotlib is not installed.
            OSError: If the file cannot be written.
        """
        self._on_rank_0(lambda: plot(self.history, ["loss"], path))

    def plot_metrics(self, path: str | Path) -> None:
        """Plot the metrics of each epoch, one panel per metric, as `plot_losses` does.

        Args:
            path: The file to write. Its suffix is the format.
        """
        self._on_rank_0(lambda: plot(self.history, list(self.metrics), path))

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
    def epoch(self) -> int:
        """How many epochs have ended."""
        return self.state.epoch

    @property
    def step(self) -> int:
        """How many optimizer steps there were in all epochs, with those that were skipped."""
        return self.state.step

    @property
    def samples_seen(self) -> int:
        """How many samples all ranks together have drawn in this epoch."""
        return self.state.samples_seen

    @property
    def history(self) -> dict[str, list[float]]:
        """Each epoch's values, such as "train_loss" and "val_loss"."""
        return self.state.history

    @property
    def running(self) -> dict[str, float]:
        """This epoch's means in the latest summary; {} before it."""
        return self.state.running

    @property
    def rank(self) -> int:
        """This process's rank; 0 if it is alone."""
        return self.info.rank

    @property
    def skipped(self) -> int:
        """How many optimizer steps were skipped because their gradients were not finite."""
        return self.optimizer_step.skipped

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
        return self.train_batches.steps_left(self.samples_seen) if self.train_batches else None

    @property
    def save_folder(self) -> Path | None:
        """Where a signal saves: the folder of the last Checkpoint; None without one."""
        return next((c.folder for c in self.callbacks[::-1] if isinstance(c, Checkpoint)), None)

    # Wiring

    def _pick_device(self, wanted: torch.device | None) -> torch.device:
        own, distributed, problem = self.info.device, self.info.distributed, ""
        if wanted is None or wanted == torch.device(own.type):  # "cuda" means the rank's own GPU
            wanted = own
        if distributed and wanted != own:
            problem = (
                f"device={wanted}, but rank {self.rank} of the open group uses {own}: leave out "
                "device, or call cleanup_ddp first"
            )
        raise_on_all_ranks(problem, distributed)  # a fixed "cuda:0" is right on rank 0
        use_device(wanted)
        return wanted

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
        if self.rank == 0 and sys.stderr is not None and sys.stderr.isatty():
            ordered.insert(0, ProgressBar())
        for callback in ordered:
            callback.handler = self
        return ordered

    def _map(self, function: Callable[[Any], Any], data: Any, batch_size: Any, loader: Any) -> Any:
        batches = self._shard(data, batch_size, **loader)
        model, measure = self._unwrapped, self.loss_and_metrics
        return outputs_in_order(function, model, measure, batches, self.info.distributed)

    def _shard(self, data: Any, batch_size: int | None = None, **loader: Any) -> DataLoader[Any]:
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

    def _method(self, name: str) -> Callable[..., Any]:
        if not hasattr(self._unwrapped, name):
            kind = type(self._unwrapped).__name__
            raise ValueError(f"Handler.{name} calls model.{name}, but {kind} has no such method")
        return getattr(self._unwrapped, name)
