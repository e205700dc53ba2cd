"""Train a model on one process or on many, with the same lines."""

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

from .batches import pair, samples_in
from .callbacks import Callback, Checkpoint, ProgressBar
from .checkpoint import NAME, bare, check_finite, find, load_weights, weights, write
from .collectives import check_same, gather_objects
from .data import TrainSampler, check_count, shard_loader, train_loader
from .decorators import on_rank
from .evaluation import evaluating, outputs_in_order
from .exchange import Exchange, Value, caught_signals
from .initialize import _resolve_device, initialize_ddp
from .objective import Objective
from .optimization import Optimization, check_parameters
from .plotting import plot_losses, plot_metrics
from .position import (
    batches_from,
    batches_left,
    check_same_data,
    data_of,
    has_known_order,
    position_after,
    set_place,
)
from .replicas import reducing, replicate
from .resume import Generators, check_fits, copied_buffers, rehearse, restore_buffers
from .run_folder import RunFolder

logger = logging.getLogger(__name__)
R = TypeVar("R")
EXIT_CODE = 143  # of a process that SIGTERM ended
NONFINITE = 'lower the learning rate, set clip_norm, or use on_nonfinite="skip"'


class Handler:
    """Train, evaluate and save `model` on every rank of the launch, or on this process alone.

    Collective, as are all methods but `stop`, `evaluate` and `log`: all ranks call. A batch is
    (inputs, targets); `loss_fn(outputs, targets)` and each of `metrics` (name: function of the
    same) are means over samples. `scheduler` steps per epoch, as `(scheduler, "step")` per
    optimizer step. `accumulate` batches make one optimizer step. `clip_norm` bounds the norm of
    its gradients; `precision` is "fp32", "bf16" or "fp16". `on_nonfinite` "raise" ends training
    with FloatingPointError, "skip" leaves such steps out; fp16 leaves out those whose gradients
    have no finite value in it. Every `exchange_every` optimizer steps the ranks tell each other of
    losses, errors and signals, and hear it a step later: so nobody waits. `run_dir` is a folder for
    this run: configuration, log, history, figures, and each epoch a checkpoint, unless a Checkpoint
    callback has its own folder. Checkpoints are also what a signal that ends training leaves.
    `find_unused_parameters` is DDP's; None: if DDP_FIND_UNUSED_PARAMETERS is 1 or true.
    Raises ValueError for a setting that this device or package does not have, and for an optimizer
    of parameters that are not the model's.
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
        exchange_every: int = 10,
        seed: int = 0,
        run_dir: str | Path | None = None,
        find_unused_parameters: bool | None = None,
    ) -> None:
        wanted = None if device is None else _resolve_device(device)
        backend = "gloo" if wanted and wanted.type == "cpu" else None
        #: what initialize_ddp returned
        self.info = initialize_ddp(backend=backend, use_distributed=use_distributed)
        if wanted is None or wanted == torch.device(self.info.device.type):  # no index: its own
            self.device = self.info.device
        else:
            self.device = wanted
        if self.info.distributed and self.device.type == "cpu" and dist.get_backend() == "nccl":
            raise ValueError("the open group is nccl's, for CUDA: leave out device, or cleanup_ddp")
        check_count("accumulate", accumulate)
        check_count("exchange_every", exchange_every)
        self.optimizer = optimizer  #: as it was given
        self.metrics = dict(metrics or {})
        self.accumulate, self.exchange_every, self.seed = accumulate, exchange_every, seed
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
        self.objective = Objective(loss_fn, self.metrics, self.device, autocast)
        check_parameters(optimizer, model)
        #: `model`, in DistributedDataParallel where there are other ranks
        self.model = replicate(model, self.device, self.info.distributed, find_unused_parameters)
        self._bare = bare(self.model)  # for all but training: a forward of DDP's may be collective
        self._run_folder = None if run_dir is None or self.rank else RunFolder(run_dir)
        self.callbacks = self._all_callbacks(callbacks, run_dir)

        self.epoch = 0  #: how many epochs have ended
        self.step = 0  #: how many optimizer steps there were, in all epochs
        self.position = 0  # the batches of this epoch that are done
        #: the values of each epoch, under names such as "train_loss" and "val_loss"
        self.history: dict[str, list[float]] = {}
        #: this epoch's "loss" and metrics as the ranks last heard of them; {} until they do
        self.running: dict[str, float] = {}
        self._sums = self.objective.new_sums()
        self._exchange = Exchange(self.info.distributed)
        self._stopping = self._signalled = False
        self._generators = Generators(seed, self.rank, self.device)
        self._data: dict[str, int | None] = {}  # what the epoch was begun with
        self._rehearsed = True
        self.train_loader: DataLoader[Any] | None = None
        self.val_loader: DataLoader[Any] | None = None

    @property
    def rank(self) -> int:
        """This process's rank; 0 where it is alone."""
        return self.info.rank

    @property
    def skipped(self) -> int:
        """How many optimizer steps were left out, as their gradients were not finite."""
        return self._optimization.skipped

    @property
    def trained_on(self) -> int | None:
        """How many samples the training set of the last epoch had; None before the first."""
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
        """The optimizer steps that are left of the epoch; None for a stream, without a length."""
        if self.train_loader is None:
            return None
        batches = batches_left(self.train_loader, self.position)
        return None if batches is None else -(-batches // self.accumulate)

    def set_train_loader(self, dataset: Dataset[Any], batch_size: int, **loader: Any) -> None:
        """Train on `dataset`, the same on all ranks, `batch_size` samples a rank and batch.

        `loader` takes what DataLoader takes. Raises ValueError as data.train_loader does, and
        where the ranks have data sets of different lengths.
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
        if batches_left(self.train_loader, position=0) == 0:
            raise ValueError(
                f"an epoch has no batch: {batch_size} samples a batch are too many for this data, "
                "or leave out drop_last"
            )
        sampler = self.train_loader.sampler
        if isinstance(sampler, TrainSampler) and sampler.repeated:
            self.log(
                f"{sampler.size} samples on {sampler.world_size} ranks: {sampler.repeated} of them "
                "come twice an epoch, so that all ranks take as many steps"
            )

    def set_val_loader(self, dataset: Dataset[Any], batch_size: int, **loader: Any) -> None:
        """Validate on `dataset`, each item once, `batch_size` samples a rank and batch."""
        self.val_loader = self._shard(dataset, batch_size, **loader)

    def train(self, epochs: int) -> None:
        """Train up to `epochs` in total: after `load`, only those that are missing.

        Raises, on all ranks alike, FloatingPointError for a loss that is not finite, and what a
        callback raised. SIGTERM and SIGUSR1 save and raise SystemExit(143).
        """
        if self.train_loader is None:
            raise ValueError("there is no training data: call set_train_loader first")
        self._begin()
        with caught_signals(self._exchange.requests.signals):
            try:
                self._train_epochs(epochs)
            except (Exception, KeyboardInterrupt) as error:
                self.log(f"ended by {type(error).__name__}: {error}")
                self._exchange.raise_untold(error)
                raise

    def stop(self) -> None:
        """Ask to end training when the ranks next hear of it: one rank will do (not collective)."""
        self._exchange.requests.stop = True

    def validate(self) -> dict[str, float]:
        """Return the mean loss ("loss") and metrics over the validation set, on every rank."""
        if self.val_loader is None:
            raise ValueError("there is no validation data: call set_val_loader first")
        return self._means(self.val_loader, self.info.distributed)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return what `validate` does, of all the `batches` on this rank alone: not collective."""
        return self._means(batches, distributed=False)

    def predict(self, dataset: Dataset[Any], batch_size: int) -> Any:
        """Return the model's outputs for `dataset`, in its order, on rank 0; None elsewhere.

        The model is fed the first element of a tuple or list, else the item. Tensors come back as
        one tensor on the CPU (empty for no items); tuples, dicts and lists as a list with an entry
        an item, which travels pickled: several times the time and the memory.
        """
        return self._map(self._bare, dataset, batch_size)

    def log_likelihood(self, dataset: Dataset[Any], batch_size: int) -> Any:
        """Return the model's own `log_likelihood(inputs)` for `dataset`, as `predict` does."""
        return self._map(_method(self._bare, "log_likelihood"), dataset, batch_size)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own `sample(*args, **kwargs)` on rank 0 while the others wait."""
        sample = _method(self._bare, "sample")
        with evaluating(self._bare, self.info.distributed):
            return self._on_rank_0(lambda: sample(*args, **kwargs))

    def save(self, path: str | Path) -> None:
        """Write a checkpoint to `path`, from which `load` goes on as if nothing had been.

        Never under `if handler.rank == 0`: rank 0 writes, but all ranks must call. Raises, on all
        ranks, OSError where it cannot be written, and FloatingPointError where a weight is not
        finite: such are never saved.
        """
        self._generators.start()
        self._meet(leave=False)  # a callback calls it, and others come after that one
        self._write(path)

    def load(self, path: str | Path) -> None:
        """Take up the checkpoint at `path`, or the newest whole one in the folder `path`.

        An empty or absent folder is a fresh start. Rank 0 reads. At the world size that saved,
        training goes on bit for bit; at another, each unseen sample of the epoch comes once.
        Raises OSError where it cannot be read, DamagedCheckpoint, ValueError where it does not fit.
        """
        found = self._on_rank_0(lambda: find(path), broadcast=True)
        if found is None:
            self.log(f"no checkpoint in {path}: a fresh start")
            return
        where, state = found
        parts = self._optimization.parts()
        check_fits(where, state, [name for name, _ in parts], self._identity())
        load_weights(self.model, state["model"])
        for name, part in parts:
            part.load_state_dict(state[name])
        for name in ("epoch", "step", "position", "history"):
            setattr(self, name, state[name])
        self._data, self.running = state["data"], {}
        self._optimization.skipped = state["skipped"]
        self._load_ranks(state["ranks"])
        self.log(f"{where}: epoch {self.epoch}, step {self.step}")

    def plot_losses(self, path: str | Path) -> None:
        """Draw the losses of each epoch into `path`, on rank 0 while the others wait.

        Its suffix is the format. Raises ValueError before the first epoch has ended or for an
        unknown format, ImportError without matplotlib, OSError where it cannot be written.
        """
        self._on_rank_0(lambda: plot_losses(self.history, path))

    def plot_metrics(self, path: str | Path) -> None:
        """Draw the metrics of each epoch into `path`, as plot_losses does."""
        self._on_rank_0(lambda: plot_metrics(self.history, list(self.metrics), path))

    def log(self, text: str) -> None:
        """Log a line on rank 0, and add it to log.txt of the run folder (not collective)."""
        if self.rank == 0:
            logger.info(text)
            if self._run_folder:
                self._run_folder.log(logger.name, text)

    # Training

    def _begin(self) -> None:
        self._generators.start()
        self._exchange = Exchange(self.info.distributed)
        self._stopping = self._signalled = False
        if self._save_folder() is None:
            self.log("no Checkpoint callback and no run_dir: a signal will end it without a save")

    def _train_epochs(self, epochs: int) -> None:
        self._call("on_train_start")
        self._meet()
        while self.epoch < epochs and not self._stopping:
            self._train_epoch()
        self._call("on_train_end")
        self._meet()

    def _train_epoch(self) -> None:
        self._begin_epoch()
        self._call("on_epoch_start")
        self.model.train()
        for window in self._windows():
            self._train_step(window)
            self._call("on_step_end")
            self._hear()
            if self._stopping:
                return
            if self.step % self.exchange_every == 0:
                self._exchange.tell(self._sums)
        if not self.position:
            raise ValueError("the training data gave no batch: an epoch must have at least one")
        self._meet()
        self._end_epoch()

    def _begin_epoch(self) -> None:
        assert self.train_loader is not None
        data = data_of(self.train_loader, self.info.world_size)
        if self.position:
            check_same_data(self._data, data)
        if self.position and not has_known_order(self.train_loader):
            warnings.warn(
                f"epoch {self.epoch + 1} is begun again: how far it was is known, but not in which "
                "order; give the sampler a set_epoch(epoch) that decides it",
                stacklevel=4,
            )
            self.position, self._sums = 0, self.objective.new_sums()
        self._data = data
        set_place(self.train_loader, self.epoch, self.position, self.rank)
        if self.position == 0:
            self._generators.restore()
            self.running = {}

    def _windows(self) -> Iterator[list[Any]]:
        """Yield the batches of each optimizer step that is left of the epoch."""
        assert self.train_loader is not None
        if self.position:
            self._generators.hold()  # the batches that are passed over may draw, too
        batches = batches_from(self.train_loader, self.position)
        self._generators.restore()  # only now: making an iterator may draw a seed
        while window := list(islice(batches, self.accumulate)):
            yield window

    def _train_step(self, window: list[Any]) -> None:
        """Take one optimizer step with the mean over the samples of all batches in `window`."""
        counts = [samples_in(pair(batch)[1]) for batch in window]
        total = sum(counts)
        if not all(counts):
            raise ValueError("a batch has no samples: let the collate_fn leave at least one")
        if not self._rehearsed:
            rehearse(self.model, lambda: self.objective.loss(self.model, window[0]), self.device)
            self._rehearsed = True
        buffers = copied_buffers(self._bare) if self._optimization.skip_nonfinite else []
        found = []
        self.optimizer.zero_grad()
        for number, (batch, count) in enumerate(zip(window, counts, strict=True), start=1):
            with reducing(self.model, last=number == len(window)):
                loss, values = self.objective(self.model, batch)
                found.append((count, self._sums.means(values)))
                share = loss if count == total else loss * (count / total)  # sizes may differ
                self._optimization.backward(share)
        taken = self._optimization.step()
        # Of a step that was not to be skipped, a loss that is not finite is to be told.
        if taken or not self._optimization.skip_nonfinite:
            for count, means in found:
                self._sums.add(count, means)
        else:
            restore_buffers(self._bare, buffers)
        self.step += 1
        assert self.train_loader is not None
        self.position = position_after(self.train_loader, self.position, len(window))

    def _end_epoch(self) -> None:
        if not self._optimization.skip_nonfinite:
            self._check_weights()
        found = {f"train_{name}": value for name, value in self.running.items()}
        if self.val_loader is not None:
            found |= {f"val_{name}": value for name, value in self.validate().items()}
        self._note(found)
        self._optimization.end_epoch(found.get("val_loss", found["train_loss"]))
        self.epoch, self.position = self.epoch + 1, 0
        self._sums = self.objective.new_sums()
        self._log_epoch(found)
        self._call("on_epoch_end")
        self._meet()

    def _note(self, found: Mapping[str, float]) -> None:
        """Add what an epoch found to the history, where a list once begun has a value for each."""
        missed = [f"val_{name}" for name in self._sums.names if f"val_{name}" in self.history]
        for name in [*found, *(name for name in missed if name not in found)]:
            values = self.history.setdefault(name, [])
            values += [math.nan] * (self.epoch - len(values))
            values.append(found.get(name, math.nan))

    def _check_weights(self) -> None:
        """Raise FloatingPointError where they are not finite, though no loss showed it yet."""
        if not all(torch.isfinite(part).all() for part in self._bare.parameters()):
            raise FloatingPointError(
                f"the weights are not finite at the end of epoch {self.epoch + 1}: {NONFINITE}"
            )

    # Decisions

    def _call(self, hook: str) -> None:
        self._exchange.call(self.callbacks, hook)
        if self._signalled:  # heard within a save of theirs
            self._meet()

    def _meet(self, leave: bool = True) -> None:
        """Tell and hear what there is, and act on it as all ranks do."""
        self._hear(leave)
        self._exchange.tell(self._sums)
        self._hear(leave)

    def _hear(self, leave: bool = True) -> None:
        """Act on what the ranks have told, if there is something, as all ranks do."""
        total = self._exchange.hear()
        if total is None:
            return
        nonfinite = total.nonfinite and not self._optimization.skip_nonfinite
        if nonfinite or total.signalled:  # the end, unless a callback has raised since they told
            self._exchange.tell(self._sums)
            self._exchange.hear()
        if nonfinite:
            with self._exchange.final():
                raise FloatingPointError(
                    f"a loss of epoch {self.epoch + 1} is not finite, found at step {self.step}: "
                    f"{NONFINITE}"
                )
        self._stopping = self._stopping or total.stop
        if self.position:  # else it is of no step
            self.running = total.means
        self._signalled = self._signalled or total.signalled
        if self._signalled and leave:
            self._save_and_leave()

    def _save_and_leave(self) -> None:
        """Save the step that all ranks are at, wait for each other, and exit."""
        if folder := self._save_folder():
            self._write(folder / NAME.format(self.step))
        self.log(f"ended by a signal at step {self.step}")
        raise SystemExit(EXIT_CODE)

    def _save_folder(self) -> Path | None:
        folders = [c.folder for c in self.callbacks if isinstance(c, Checkpoint)]
        return folders[0] if folders else None

    # Checkpoints

    def _write(self, path: str | Path) -> None:
        with self._exchange.final():
            mine = (self._generators.state(), self._sums.state())
            ranks = gather_objects(mine) if self.info.distributed else [mine]
            self._on_rank_0(lambda: write(path, self._state(ranks or [])))

    def _state(self, ranks: list[tuple[dict[str, Any], Tensor]]) -> dict[str, Any]:
        check_finite(self._bare)
        names = ("epoch", "step", "position", "history", "skipped")
        return {
            "model": weights(self.model),
            "ranks": [{"generators": state, "sums": sums} for state, sums in ranks],
            "data": self._data,
            **self._identity(),
            **{name: getattr(self, name) for name in names},
            **{name: part.state_dict() for name, part in self._optimization.parts()},
        }

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the Handler that loads it must have in common."""
        return {
            "seed": self.seed,
            "metrics": list(self.metrics),
            "optimizer_type": type(self.optimizer).__name__,
        }

    def _load_ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Take up this rank's generators and sums, or at another world size new ones and a part."""
        self._sums = self.objective.new_sums()
        if len(ranks) == self.info.world_size:
            self._rehearsed = self.step == 0
            self._generators.load(ranks[self.rank]["generators"], self.step)
        else:
            self._generators.load(None, self.step)
        for past in ranks[self.rank :: self.info.world_size]:
            self._sums.add_state(past["sums"])

    def _means(self, batches: Iterable[Any], distributed: bool) -> dict[str, float]:
        ends = self._exchange.final() if distributed else nullcontext()
        with ends, evaluating(self._bare, distributed):
            return self.objective.over(self._bare, batches).total(distributed).means

    def _map(self, function: Callable[[Any], Any], dataset: Dataset[Any], batch_size: int) -> Any:
        batches = self._shard(dataset, batch_size)
        distributed = self.info.distributed
        with self._exchange.final(), evaluating(self._bare, distributed), self.objective.autocast():
            return outputs_in_order(function, batches, self.device, distributed)

    def _shard(self, dataset: Dataset[Any], batch_size: int, **loader: Any) -> DataLoader[Any]:
        self._check_same(items=_length(dataset))
        world_size = self.info.world_size
        return shard_loader(dataset, batch_size, rank=self.rank, world_size=world_size, **loader)

    # Settings, and what the ranks share

    def _check_same(self, **lengths: int) -> None:
        if self.info.distributed:
            check_same(self.device, **lengths)

    def _all_callbacks(
        self, callbacks: Sequence[Callback], run_dir: str | Path | None
    ) -> list[Callback]:
        """Return the user's callbacks and ours, which come last to find what the others left."""
        found = list(callbacks)
        if run_dir is not None and not any(isinstance(c, Checkpoint) for c in found):
            found.append(Checkpoint(run_dir))
        if self._run_folder:
            found.append(self._run_folder)
        if self.rank == 0 and sys.stderr is not None and sys.stderr.isatty():
            found.insert(0, ProgressBar())
        for callback in found:
            callback.handler = self
        return found

    def _on_rank_0(self, work: Callable[[], R], broadcast: bool = False) -> R | None:
        return on_rank(0, broadcast=broadcast)(work)() if self.info.distributed else work()

    def _log_epoch(self, found: Mapping[str, float]) -> None:
        text = " | ".join(f"{name} {value:.4g}" for name, value in found.items())
        skipped = f" | {self.skipped} steps skipped" if self.skipped else ""
        self.log(f"epoch {self.epoch} | {text}{skipped}")


def _method(model: nn.Module, name: str) -> Callable[..., Any]:
    method = getattr(model, name, None)
    if method is None:
        raise ValueError(f"Handler.{name} calls the model's own: give {type(model).__name__} one")
    return method


def _length(data: Any) -> int:
    """Return the length; -1 where there is none."""
    try:
        return len(data)
    except TypeError:
        return -1
