"""Train a model on one process or on many, with the same lines."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from .batches import batches_from, move, pair, samples_in, set_place
from .callbacks import Callback, Checkpoint, ProgressBar
from .checkpoint import NAME, bare, load_weights, read, read_newest, weights, write
from .collectives import gather_objects
from .data import TrainSampler, check_count, shard_loader, train_loader
from .decorators import on_rank
from .evaluation import evaluating, outputs_in_order
from .exchange import Requests, Sums, Total, Value, caught_signals
from .initialize import _resolve_device, initialize_ddp, side_group
from .optimization import Optimization
from .outcomes import settle
from .randomness import generator_state, seed_everything, set_generator_state

logger = logging.getLogger(__name__)
R = TypeVar("R")
EXIT_CODE = 143  # of a process that SIGTERM ended


class Handler:
    """Train, evaluate and save `model` on every rank of the launch, or on this process alone.

    Collective, as are all methods but `stop`: all ranks call. A batch is (inputs, targets);
    `loss_fn(outputs, targets)` and each of `metrics` (name: function of the same) are means over
    samples. `scheduler` steps per epoch, as `(scheduler, "step")` per optimizer step.
    `accumulate` batches make one optimizer step. `clip_norm` bounds the gradients' norm;
    `precision` is "fp32", "bf16" or "fp16". `on_nonfinite` "raise" ends training with
    FloatingPointError, "skip" leaves such steps out. Every `exchange_every` optimizer steps the
    ranks tell each other of losses, errors and signals. What a signal ends is saved into the folder
    of a Checkpoint callback, else into `run_dir`.
    DDP_FIND_UNUSED_PARAMETERS=1 in the environment is DDP's find_unused_parameters.
    Raises ValueError for a setting that this device or package does not have.
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
    ) -> None:
        wanted = None if device is None else _resolve_device(device)
        backend = "gloo" if wanted and wanted.type == "cpu" else None
        self.info = initialize_ddp(backend=backend, use_distributed=use_distributed)
        if wanted is None or wanted == torch.device(self.info.device.type):  # no index: its own
            self.device = self.info.device
        else:
            self.device = wanted
        self.optimizer, self.loss_fn, self.metrics = optimizer, loss_fn, dict(metrics or {})
        self.accumulate, self.exchange_every, self.seed = accumulate, exchange_every, seed
        self.run_dir = None if run_dir is None else Path(run_dir)
        self._check_settings()
        self._optimization = Optimization(
            optimizer,
            scheduler,
            self.device,
            clip_norm=clip_norm,
            precision=precision,
            on_nonfinite=on_nonfinite,
        )
        self.model = self._wrap(model)
        self._bare = bare(self.model)  # for all but training: a forward of DDP's may be collective
        self.callbacks = list(callbacks)
        if self.rank == 0 and sys.stderr.isatty():
            self.callbacks.insert(0, ProgressBar())
        for callback in self.callbacks:
            callback.handler = self

        self.epoch = self.step = self.position = 0
        self.history: dict[str, list[float]] = {}
        self.running: dict[str, float] = {}  # means of this epoch, as of the last exchange
        self._sums = self._new_sums()
        self._requests, self._stopping = Requests(), False
        self._agreed: BaseException | None = None  # raised on all ranks alike: not to be kept
        self._generators: dict[str, Any] | None = None  # loaded, and not yet set
        self._seeded = False
        self._loaded_world_size, self._rehearsed = self.info.world_size, True
        self._train_loader: DataLoader[Any] | None = None
        self._val_loader: DataLoader[Any] | None = None

    @property
    def rank(self) -> int:
        """This process's rank; 0 where it is alone."""
        return self.info.rank

    @property
    def skipped(self) -> int:
        """How many optimizer steps were left out, as their gradients were not finite."""
        return self._optimization.skipped

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
        """The optimizer steps to the end of this epoch; None for a stream, which has no length."""
        try:
            return -(-len(self._train_loader) // self.accumulate)  # type: ignore[arg-type]
        except TypeError:
            return None

    def set_train_loader(self, dataset: Dataset[Any], batch_size: int, **loader: Any) -> None:
        """Train on `dataset`, `batch_size` samples a rank and batch.

        `loader` takes what DataLoader takes. Raises ValueError as data.train_loader does.
        """
        self._train_loader = train_loader(
            dataset,
            batch_size,
            rank=self.rank,
            world_size=self.info.world_size,
            seed=self.seed,
            **loader,
        )
        sampler = self._train_loader.sampler
        if isinstance(sampler, TrainSampler) and sampler.repeated:
            self._log(
                f"{sampler.size} samples on {sampler.world_size} ranks: {sampler.repeated} of them "
                "come twice an epoch, so that all ranks take as many steps"
            )

    def set_val_loader(self, dataset: Dataset[Any], batch_size: int, **loader: Any) -> None:
        """Validate on `dataset`, each item once, `batch_size` samples a rank and batch."""
        self._val_loader = self._shard(dataset, batch_size, **loader)

    def train(self, epochs: int) -> None:
        """Train up to `epochs` in total: after `load`, only those that are missing.

        Raises, on all ranks alike, FloatingPointError for a loss that is not finite, and what a
        callback raised. SIGTERM and SIGUSR1 save and raise SystemExit(143).
        """
        if self._train_loader is None:
            raise ValueError("there is no training data: call set_train_loader first")
        self._begin()
        with caught_signals(self._requests.signals):
            self._call("on_train_start")
            self._exchange()
            while self.epoch < epochs and not self._stopping:
                self._train_epoch()
            self._call("on_train_end")
            self._exchange()

    def stop(self) -> None:
        """Ask to end training at the next exchange; one rank is enough (not collective)."""
        self._requests.stop = True

    def validate(self) -> dict[str, float]:
        """Return the mean loss ("loss") and metrics over the validation set, on every rank."""
        if self._val_loader is None:
            raise ValueError("there is no validation data: call set_val_loader first")
        sums = self._new_sums()
        with evaluating(self._bare, self.info.distributed):
            for batch in self._val_loader:
                inputs, targets = pair(move(batch, self.device))
                _, values = self._forward(self._bare, inputs, targets)
                sums.vector += sums.row(samples_in(targets), values)
        return sums.total([], self.info.distributed).means

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

        Raises, on all ranks, OSError where it cannot be written, and FloatingPointError where a
        weight is not finite: such are never saved.
        """
        self._seed()
        self._exchange()
        self._write(path)

    def load(self, path: str | Path) -> None:
        """Take up the checkpoint at `path`, or the newest whole one in the folder `path`.

        An empty or absent folder is a fresh start. Rank 0 reads. At the world size that saved,
        training goes on bit for bit; at another, each unseen sample of the epoch comes once.
        Raises FileNotFoundError, DamagedCheckpoint, ValueError where it does not fit this Handler.
        """
        found = self._on_rank_0(lambda: _read(Path(path)), broadcast=True)
        if found is None:
            self._log(f"no checkpoint in {path}: a fresh start")
            return
        where, state = found
        self._check_fits(where, state)
        load_weights(self.model, state["model"])
        for name, part in self._optimization.parts():
            part.load_state_dict(state[name])
        for name in ("epoch", "step", "position", "history"):
            setattr(self, name, state[name])
        self._optimization.skipped = state["skipped"]
        self._load_ranks(state["ranks"])
        self._log(f"{where}: epoch {self.epoch}, step {self.step}")

    # Training

    def _begin(self) -> None:
        self._seed()
        self._requests, self._stopping, self._agreed = Requests(), False, None
        if self._save_folder() is None:
            self._log("no Checkpoint callback and no run_dir: a signal will end it without a save")

    def _seed(self) -> None:
        """Seed the generators once: dropout differs by rank."""
        if not self._seeded:
            seed_everything(self.seed, self.rank)
            self._seeded = True

    def _train_epoch(self) -> None:
        assert self._train_loader is not None
        set_place(self._train_loader, self.epoch, self.position)
        if self.position == 0:
            self._restore_generators()
        self._call("on_epoch_start")
        self.model.train()
        for window in self._windows():
            self._train_step(window)
            self._call("on_step_end")
            if self.step % self.exchange_every == 0:
                self._exchange()
                if self._stopping:
                    return
        self._exchange()
        self._end_epoch()

    def _windows(self) -> Iterator[list[Any]]:
        """Yield the batches of each optimizer step that is left of the epoch."""
        assert self._train_loader is not None
        self._check_place(self._train_loader)
        batches = batches_from(self._train_loader, self.position // self.info.world_size)
        self._restore_generators()  # only now: making an iterator may draw a seed
        while window := list(islice(batches, self.accumulate)):
            yield window

    def _check_place(self, loader: DataLoader[Any]) -> None:
        past, world_size = self._loaded_world_size, self.info.world_size
        if self.position and past != world_size and not isinstance(loader.sampler, TrainSampler):
            raise ValueError(
                f"with a sampler of your own, an epoch begun on {past} ranks cannot go on at "
                f"{world_size}: leave the sampler out, or start {past} ranks"
            )

    def _train_step(self, window: list[Any]) -> None:
        """Take one optimizer step with the mean over the samples of all batches in `window`."""
        counts = [samples_in(pair(batch)[1]) for batch in window]
        total = sum(counts)
        if not self._rehearsed:
            self._rehearse(window[0])
        row = torch.zeros_like(self._sums.vector)
        self.optimizer.zero_grad()
        for number, (batch, count) in enumerate(zip(window, counts, strict=True), start=1):
            inputs, targets = pair(move(batch, self.device))
            with self._reducing(number == len(window)):
                loss, values = self._forward(self.model, inputs, targets)
                loss = loss * (count / total)  # batches may differ in size
                self._optimization.backward(loss)
            row += self._sums.row(count, values)
        if self._optimization.step():
            self._sums.vector += row
        self.step += 1
        self.position += total * self.info.world_size

    def _rehearse(self, batch: Any) -> None:
        """Run a batch without a trace, before the first step of a resumed run.

        After its first backward DDP lays out the gradients anew, and on three ranks or more the
        layout decides in which order they are summed: without this, the last bits would differ.
        """
        self._rehearsed = True
        if not isinstance(self.model, DistributedDataParallel):
            return
        generators = generator_state(self.device)
        buffers = [buffer.clone() for buffer in self._bare.buffers()]
        inputs, targets = pair(move(batch, self.device))
        with self._optimization.autocast():
            self.loss_fn(self.model(inputs), targets).backward()
        for buffer, before in zip(self._bare.buffers(), buffers, strict=True):
            buffer.copy_(before)
        set_generator_state(generators, self.device)

    def _forward(
        self, model: nn.Module, inputs: Any, targets: Any
    ) -> tuple[Tensor, dict[str, Value]]:
        with self._optimization.autocast():
            outputs = model(inputs)
            loss = self.loss_fn(outputs, targets)
            with torch.no_grad():
                values = {name: metric(outputs, targets) for name, metric in self.metrics.items()}
        return loss, {"loss": loss} | values

    def _end_epoch(self) -> None:
        for name, value in self.running.items():
            self.history.setdefault(f"train_{name}", []).append(value)
        if self._val_loader is not None:
            for name, value in self.validate().items():
                self.history.setdefault(f"val_{name}", []).append(value)
        self._optimization.end_epoch((self.val_losses or self.train_losses)[-1])
        self.epoch, self.position = self.epoch + 1, 0
        self._sums = self._new_sums()
        self._log_epoch()
        self._call("on_epoch_end")
        self._exchange()

    # Decisions

    def _call(self, hook: str) -> None:
        """Call `hook` of each callback; keep the first exception until the next exchange."""
        for callback in self.callbacks:
            try:
                getattr(callback, hook)()
            except Exception as error:
                if error is self._agreed:
                    raise
                # The callbacks after it are called all the same: the other ranks' are, and one of
                # them may be collective.
                self._requests.error = self._requests.error or error

    def _exchange(self) -> None:
        """Tell and hear what there is, and act on it as all ranks do."""
        total = self._sums.total(self._requests.flags(), self.info.distributed)
        stop, signalled, failed = total.flags
        try:
            self._raise_alike(total, failed)
        except BaseException as error:
            self._agreed = error
            raise
        self._stopping = self._stopping or stop
        self._requests.stop = False
        self.running = total.means
        if signalled:
            self._save_and_leave()

    def _raise_alike(self, total: Total, failed: bool) -> None:
        error, self._requests.error = self._requests.error, None
        group = side_group() if self.info.distributed else None
        if failed and group:
            settle(group, "the callbacks of Handler.train", range(self.info.world_size), error)
        elif error:
            raise error
        if total.nonfinite and not self._optimization.skip_nonfinite:
            raise FloatingPointError(
                f"a loss of epoch {self.epoch + 1} is not finite, found at step {self.step}: lower "
                'the learning rate, set clip_norm, or use on_nonfinite="skip"'
            )

    def _save_and_leave(self) -> None:
        """Save the step that all ranks are at, wait for each other, and exit."""
        if folder := self._save_folder():
            self._write(folder / NAME.format(self.step))
        self._log(f"ended by a signal at step {self.step}")
        raise SystemExit(EXIT_CODE)

    def _save_folder(self) -> Path | None:
        folders = [c.folder for c in self.callbacks if isinstance(c, Checkpoint)]
        return folders[0] if folders else self.run_dir

    # Checkpoints

    def _write(self, path: str | Path) -> None:
        mine = (self._generators or generator_state(self.device), self._sums.vector.cpu())
        ranks = gather_objects(mine) if self.info.distributed else [mine]
        try:
            self._on_rank_0(lambda: write(path, self._state(ranks or [])))
        except BaseException as error:
            self._agreed = error
            raise

    def _state(self, ranks: list[tuple[dict[str, Any], Tensor]]) -> dict[str, Any]:
        _check_finite(self._bare)
        names = ("epoch", "step", "position", "history", "skipped", "seed")
        return {
            "model": weights(self.model),
            "ranks": [{"generators": state, "sums": sums} for state, sums in ranks],
            "world_size": self.info.world_size,
            **{name: getattr(self, name) for name in names},
            **{name: part.state_dict() for name, part in self._optimization.parts()},
        }

    def _check_fits(self, where: Path, state: dict[str, Any]) -> None:
        known = {"optimizer", "scheduler", "scaler"} & state.keys()
        own = {name for name, _ in self._optimization.parts()}
        if "ranks" not in state or known != own:
            raise ValueError(
                f"{where} holds the state of {', '.join(sorted(known)) or 'no optimizer'}, this "
                f"Handler has {', '.join(sorted(own))}: make it as the one that saved was made"
            )
        if state["seed"] != self.seed:
            raise ValueError(
                f"{where} is of a run with seed {state['seed']}, not {self.seed}: its place in the "
                f"data would be lost; use Handler(..., seed={state['seed']})"
            )
        if len(state["ranks"][0]["sums"]) != len(self._sums.vector):
            raise ValueError(f"{where} has sums of other metrics than {list(self.metrics)}")

    def _load_ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Take up this rank's generators and sums, or at another world size new ones and a part."""
        self._loaded_world_size, self._seeded = len(ranks), True
        self._sums = self._new_sums()
        if len(ranks) == self.info.world_size:
            self._rehearsed = self.step == 0
            self._generators = ranks[self.rank]["generators"]
            self._sums.vector += ranks[self.rank]["sums"].to(self.device)
            return
        self._generators = None
        seed_everything(self.seed, self.rank, self.step)
        for past in ranks[self.rank :: self.info.world_size]:
            self._sums.vector += past["sums"].to(self.device)

    def _restore_generators(self) -> None:
        if self._generators is not None:
            set_generator_state(self._generators, self.device)
            self._generators = None

    def _map(self, function: Callable[[Any], Any], dataset: Dataset[Any], batch_size: int) -> Any:
        batches = self._shard(dataset, batch_size)
        with evaluating(self._bare, self.info.distributed), self._optimization.autocast():
            return outputs_in_order(function, batches, self.device, self.info.distributed)

    def _shard(self, dataset: Dataset[Any], batch_size: int, **loader: Any) -> DataLoader[Any]:
        world_size = self.info.world_size
        return shard_loader(dataset, batch_size, rank=self.rank, world_size=world_size, **loader)

    # Settings, and what the ranks share
    def _wrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            raise ValueError("the model is wrapped in DDP already: give Handler the model inside")
        model = model.to(self.device)
        if not self.info.distributed:
            return model
        return DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            find_unused_parameters=_switch("DDP_FIND_UNUSED_PARAMETERS"),
        )

    def _check_settings(self) -> None:
        check_count("accumulate", self.accumulate)
        check_count("exchange_every", self.exchange_every)
        if "loss" in self.metrics:
            raise ValueError('a metric cannot be named "loss", the loss is: choose another name')

    def _new_sums(self) -> Sums:
        return Sums(["loss", *self.metrics], self.device)

    def _reducing(self, last: bool) -> AbstractContextManager[Any]:
        """Let DDP reduce gradients in the last backward of a step only."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def _on_rank_0(self, work: Callable[[], R], broadcast: bool = False) -> R | None:
        return on_rank(0, broadcast=broadcast)(work)() if self.info.distributed else work()

    def _log(self, text: str) -> None:
        if self.rank == 0:
            logger.info(text)

    def _log_epoch(self) -> None:
        last = [(name, values[-1]) for name, values in self.history.items() if values]
        text = " | ".join(f"{name} {value:.4g}" for name, value in last)
        skipped = f" | {self.skipped} steps skipped" if self.skipped else ""
        self._log(f"epoch {self.epoch} | {text}{skipped}")


def _check_finite(model: nn.Module) -> None:
    """Raise FloatingPointError for what no training comes back from."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise FloatingPointError(f"{name} is not finite: it is not saved, load an earlier one")
    for name, buffer in model.named_buffers():
        if torch.isnan(buffer).any():  # an infinite one may be meant, such as a mask
            raise FloatingPointError(
                f"{name} is not a number: it is not saved, load an earlier one"
            )


def _read(path: Path) -> tuple[Path, dict[str, Any]] | None:
    if path.is_file() or (path.suffix == ".pt" and not path.is_dir()):
        return path, read(path)
    return read_newest(path)


def _method(model: nn.Module, name: str) -> Callable[..., Any]:
    method = getattr(model, name, None)
    if method is None:
        raise ValueError(f"Handler.{name} calls the model's own: give {type(model).__name__} one")
    return method


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").lower()
    if value not in ("", "0", "false", "1", "true"):
        raise ValueError(f"{name} must be 1, 0, true or false, not {value!r}")
    return value in ("1", "true")
