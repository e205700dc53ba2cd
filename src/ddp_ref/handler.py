"""Handler: the scripts' Trainer, grown up. It trains, evaluates, saves and resumes a model.

Read it from top to bottom. `train` runs `_run_epoch`, which runs `_run_step` for each optimizer
step, which runs `_run_batch` for each of its batches.
"""

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from . import checkpoint, data as loading, model as models, settings
from .agreement import check_replicas, check_same, shared
from .callbacks import Callback, Checkpoint, check_monitors, ordered
from .collectives import exchange_objects, gather_objects
from .decorators import on_rank
from .initialize import CPU
from .metrics import Sums, accumulates, compute_objects, count_of, reset_objects, weight_of
from .randomness import generator_state, seed_everything, set_generator_state
from .signals import EXIT_CODE, Signalled, caught_signals

FORMAT = 4  # of a checkpoint; another version's has none, or another number
# The attributes that a checkpoint contains.
STATE = ("epoch", "step", "skipped", "samples_seen", "history", "settings", "data")


class Handler:
    """Train, evaluate and save a model on every rank of the launch, or on this process alone.

    The constructor and all methods are collective, so all ranks call them, except `stop`,
    `evaluate`, `log` and the setters of loaders. SIGTERM, SIGUSR1 or SIGHUP on any rank ends
    training, with a checkpoint if there is a folder for checkpoints.

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
            finite gradients. Default: the first dimension of the targets. For a batch that is not
            a pair, `num_graphs` or the first dimension of its first tensor. Without `count`, all
            ranks weigh the same in a step, so pass it if their batches differ in size.
        metrics: By name, functions called like `loss_fn`, each a mean over samples. In validation
            also objects with `update(outputs, targets)`, `compute()` and `reset()`, such as those
            of torchmetrics. `compute` is called once, returns one number and reduces over ranks
            itself. Objects of torchmetrics that collect lists need at least one sample per rank.
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
        sync_every: Optimizer steps between two exchanges of losses, signals and `stop`.
        seed: Seeds the data order and, together with the rank, dropout.
        run_dir: A folder for history.csv and for a checkpoint per epoch, unless `callbacks` has a
            Checkpoint with its own folder.
        ddp_options: Keywords of DistributedDataParallel, such as `find_unused_parameters`.
            With `forward_sync_buffers=False` (before torch 2.13, `broadcast_buffers=False`), each
            rank evaluates with its own buffers, and checkpoints contain rank 0's.
        log: Called on rank 0 with each line, such as an epoch's results.

    Raises:
        ValueError: If a setting is wrong or the device does not support it, or if the optimizer
            has parameters that are not the model's.
        TypeError: If an argument has the wrong type, or, on several ranks, DDP has no such keyword.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
        count: Callable[[Any], float | Tensor] | None = None,
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
        log: Callable[[str], Any] = print,
    ) -> None:
        options, metrics = dict(ddp_options or {}), {} if metrics is None else metrics
        callbacks = list(callbacks)  # it may be a generator
        settings.check_numbers(accumulate, sync_every, clip_norm)
        settings.check_choices(precision, on_nonfinite, options if accumulate > 1 else {})
        settings.check_optimizer(optimizer, model)
        settings.check_functions(loss_fn, metrics, callbacks)
        self.scheduler, self.scheduler_unit = settings.scheduler_and_unit(scheduler, optimizer)
        #: what initialize_ddp returned
        self.info, self.device = settings.join(device, precision, use_distributed)
        self.rank = self.info.rank  #: this process's rank; 0 if it is alone
        self.distributed = self.info.distributed  #: whether there are other ranks
        self.accumulate, self.sync_every, self.seed = accumulate, sync_every, operator.index(seed)
        self.clip_norm, self.precision, self.on_nonfinite = clip_norm, precision, on_nonfinite
        self.model: Any = model.to(self.device)  #: the model, in DDP if there are other ranks
        if self.distributed:
            self.model = models.wrap_model(model, self.device, **options)
        self.module: Any = models.unwrap_model(model)  #: the model inside DDP and torch.compile
        self._trainable = [parameter.requires_grad for parameter in model.parameters()]
        self.optimizer = optimizer  #: the optimizer that was given
        if optimizer.state:  # Adagrad creates its state early, on the CPU: move it as well
            optimizer.load_state_dict(optimizer.state_dict())
        self.loss_fn: Callable[[Any, Any], Any] = loss_fn
        self.forward, self.count = forward, count
        self.metrics = dict(metrics)  #: the metrics by name
        self._objects = {n: m for n, m in metrics.items() if accumulates(m)}
        self._functions = {n: m for n, m in metrics.items() if n not in self._objects}
        for part in (loss_fn, *metrics.values()):
            if isinstance(part, nn.Module):  # it may have class weights, or a metric's state
                part.to(self.device)
        dtype = settings.PRECISIONS[precision]
        self._autocast = torch.autocast(self.device.type, dtype, enabled=dtype is not None)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self._scale: float | None = None  # the loss scale after the last step
        self.run_dir, self._log = run_dir, log
        self.callbacks = ordered(callbacks, run_dir)  #: the callbacks, in the order of their calls
        for callback in self.callbacks:
            callback.handler = self
        self.epoch = 0  #: how many epochs have ended
        self.step = 0  #: optimizer steps in all epochs, including skipped ones
        self.skipped = 0  #: steps that were skipped because their gradients were not finite
        self.samples_seen = 0  #: how many samples all ranks together have drawn in this epoch
        self.history: dict[str, list[float]] = {}  #: each epoch's values, such as "train_loss"
        self.running: dict[str, float] = {}  #: this epoch's means in the latest exchange
        self.settings = settings.group_settings(optimizer)  #: of the parameter groups, at the start
        self.data: dict[str, Any] = {}  #: what must stay the same within an epoch
        self.stopping = False  #: whether `stop` has reached all ranks
        self._sums = Sums(self._functions, self.device)  # of this epoch, on this rank
        self._stop, self._signals = False, list[int]()  # what this rank asks the others for
        self._rng: Any = (self.seed, self.rank)  # a seed or a state, to be set when an epoch starts
        self._train_loader: Any = None
        self._val_loader: Any = None
        self.steps_per_epoch: int | None = None  #: for data without a length
        self._samples_per_batch = 1  # over all ranks
        self._stream: Iterator[Any] | None = None
        self._compared: dict[str, Any] = {}  # the loaders whose data the ranks have compared
        self._tried_to_save = False

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
            ValueError: If an option is wrong.
        """
        made = self._loader(loading.train_loader, data, batch_size, seed=self.seed, **loader)
        if steps_per_epoch is not None:
            settings.check_count("steps_per_epoch", steps_per_epoch)
        if (loading.length_or_none(made) is None) != (steps_per_epoch is not None):
            raise ValueError("pass steps_per_epoch for data without a length, and only for it")
        self._train_loader, self.steps_per_epoch, self._stream = made, steps_per_epoch, None
        self._samples_per_batch = loading.samples_per_batch(made) * self.info.world_size

    def set_val_loader(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None, **loader: Any
    ) -> None:
        """Set the validation data. Each item is used exactly once, on one of the ranks.

        Args:
            data: A data set, the same on all ranks, or an existing DataLoader of one.
            batch_size: Samples per rank and batch. Default: the existing loader's.
            **loader: Anything else that DataLoader takes, except shuffling and samplers.

        Raises:
            ValueError: If an option is wrong.
        """
        self._val_loader = self._loader(loading.eval_loader, data, batch_size, **loader)

    @property
    def train_loader(self) -> Any:
        """This rank's training loader; `set_train_loader` sets it."""
        return self._train_loader

    @property
    def val_loader(self) -> Any:
        """This rank's validation loader; `set_val_loader` sets it."""
        return self._val_loader

    def _loader(self, make: Any, data: Any, batch_size: int | None, **options: Any) -> Any:
        """Make this rank's loader, with `train_loader` or `eval_loader`."""
        if self.device.type == "cuda" and not isinstance(data, DataLoader):
            options.setdefault("pin_memory", True)
        return make(data, batch_size, rank=self.rank, world_size=self.info.world_size, **options)

    # Training, in the order of the scripts

    def load(self, path: str | Path, keep: Sequence[str] = ()) -> None:
        """Load the checkpoint `path`, or the newest intact one in the folder `path`.

        If the folder is empty or missing, the run starts from scratch. Rank 0 reads the file and
        sends it to the others. On the CPU, a run resumed on the same number of ranks, one or two,
        equals the uninterrupted one bit for bit; on more, up to rounding. At another world size,
        each remaining sample of the epoch is used once, apart from the usual padding.

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
        settings.check_keep(keep, self.optimizer, self.scheduler)
        if self.distributed:
            exchange_objects(None, "Handler.load")  # a rank that does not load is named
        found = self._on_rank_0(lambda: checkpoint.find(path), broadcast=True)
        if found is None:
            self.log(f"no checkpoint in {path}: starting from scratch")
            return
        file, saved = found
        if saved.keys().isdisjoint(("ranks", "samples_seen")):
            checkpoint.load_weights(self.model, checkpoint.weights_in(file, saved))
            self.log(f"{file} is not from Handler.save: taking its weights only")
            return
        checkpoint.check_fits(file, saved, self._must_match())
        checkpoint.check_groups(file, saved, self.optimizer)
        ranks, own = saved["ranks"], settings.group_settings(self.optimizer)
        for started, theirs in zip(self.settings, saved["settings"], strict=False):
            changed = [n for n in started if n not in keep and started[n] != theirs.get(n)]
            if changed and self.rank == 0:
                text = ", ".join(f"{n}={theirs.get(n)} instead of {started[n]}" for n in changed)
                scheduled = self.scheduler and "lr" in changed
                way = settings.SCALE_LR if scheduled else f"pass keep={changed}"
                warnings.warn(f"{file} has {text}. To keep yours, {way}", stacklevel=2)
        if self.scheduler_unit == "step" and len(ranks) != self.info.world_size and self.rank == 0:
            warnings.warn(
                f"{file} was saved by {len(ranks)} ranks, and {self.info.world_size} ranks take "
                "another number of steps per epoch: a scheduler that counts steps will end at "
                f"another epoch. Plan it again, or use {len(ranks)} ranks",
                stacklevel=2,
            )
        checkpoint.load_weights(self.model, saved["model"])
        for name, part in self._parts().items():
            part.load_state_dict(saved[name])
        for name in STATE:
            setattr(self, name, saved[name])
        self._load_ranks(ranks)
        for groups in (self.optimizer.param_groups, self.settings):
            for group, before in zip(groups, own, strict=True):
                group.update({name: before[name] for name in keep if name in before})
        self.log(f"loaded {file}: epoch {self.epoch}, step {self.step}")

    def _load_ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Load what each rank had of its own: random numbers, sums, the state of the loss."""
        world_size = self.info.world_size
        same = len(ranks) == world_size
        own = ranks[self.rank if same else 0]
        self._rng = own["rng"] if same else (self.seed, self.rank, self.step)
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.load_state_dict(own["loss_fn"])
        self.running, self._scale, self._stream = {}, None, None
        self._sums = Sums(self._functions, self.device)
        for past in ranks[self.rank :: world_size]:  # a share of the old ranks' sums
            self._sums.count += past["count"]
            self._sums.totals += past["totals"].to(self.device)

    def _run_batch(self, batch: Any, count: float, weight: Callable[[float], Any]) -> None:
        """Run forward and backward; `weight(count)` is the loss's weight in the step's gradient."""
        with self._fresh_autocast():
            outputs, targets, loss = self._forward(self.model, batch)
            self._sums.add(count, loss, outputs, targets)
        share = weight(count)
        weighted = loss if type(share) is float and share == 1 else loss * share
        self._scaler.scale(weighted).backward()  # here, DDP averages the gradients

    def _fresh_autocast(self) -> Any:
        """Return this run's precision, also inside the caller's own autocast.

        There, torch would keep the weights that it has cast before the optimizer changed them.
        """
        torch.clear_autocast_cache()
        return self._autocast

    def _forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any, Tensor]:
        """Move the batch to the device and run the model; return outputs, targets and the loss."""
        outputs, targets = models.run_model(model, models.move(batch, self.device), self.forward)
        loss = self.loss_fn(outputs, targets)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn must return a tensor, not {loss!r:.60}: leave out .item()")
        return outputs, targets, loss

    def _run_step(self, batches: list[tuple[Any, int | None]]) -> None:
        """Take one optimizer step with the mean gradient over the samples of all batches."""
        counts = [count_of(batch, items, self.count) for batch, items in batches]
        world_size = self.info.world_size if self.count else 1  # else all ranks have equal counts
        weight = weight_of(counts, world_size, self.device)
        skips = self.on_nonfinite == "skip"
        before = (self._sums.count, self._sums.totals.clone()) if skips else None
        self.optimizer.zero_grad()
        for number, ((batch, _), count) in enumerate(zip(batches, counts, strict=True), start=1):
            last = number == len(batches) or not isinstance(self.model, DistributedDataParallel)
            with nullcontext() if last else self.model.no_sync():
                self._run_batch(batch, count, weight)
        taken = self._step_optimizer()
        if taken and self.scheduler_unit == "step":
            self.scheduler.step()
        if before and not taken:  # a loss that is not finite would be in the epoch's mean
            self._sums.count = before[0]
            self._sums.totals.copy_(before[1])
        self.step += 1
        self.skipped += not taken
        self.samples_seen += len(batches) * self._samples_per_batch

    def _step_optimizer(self) -> bool:
        """Clip the gradients and step; return False if the step was left out."""
        scaler, skips, taken = self._scaler, self.on_nonfinite == "skip", True
        scaler.unscale_(self.optimizer)
        # Read the scale once per step, because in fp16 reading it waits for the GPU.
        scale = self._scale or scaler.get_scale()
        if skips or self.clip_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            norm = nn.utils.clip_grad_norm_(parameters, self.clip_norm or math.inf)
            # DDP has already averaged the gradients, so all ranks agree.
            taken = not skips or bool(norm.isfinite())
        if taken:
            scaler.step(self.optimizer)
        scaler.update()
        self._scale = scaler.get_scale()
        # GradScaler skips a step with infinite gradients. The only sign is the smaller scale.
        return taken and self._scale >= scale

    def _run_epoch(self, last_step: float) -> None:
        """Run what is left of the epoch, validate, and record the epoch's values."""
        self.model.train()
        if not self.samples_seen:
            self._set_rng()
            self.running = {}
        self._call("on_epoch_start")
        steps = self._start_epoch()  # now, because a hook may have replaced the training data
        self._set_rng()  # on a mid-epoch resume, to undo what the hooks have drawn
        for batches in steps:
            self._run_step(batches)
            self._call("on_step_end")
            ends_here = self.step == last_step and self.steps_left != 0
            if ends_here or self.step % self.sync_every == 0:
                self._sync()
            if ends_here or self.stopping:
                return  # the epoch stays open
        self._sync()
        self._rng = generator_state(self.device)  # if a signal ends validation, to repeat it
        self._call("on_validation_start")
        self._end_epoch()
        self._rng = None
        self._call("on_epoch_end")
        self._sync()

    def _start_epoch(self) -> Iterator[list[tuple[Any, int | None]]]:
        """Return the rest of the epoch: the batches of each step, with their numbers of items."""
        loader: Any = self._train_loader
        if self._trainable != [parameter.requires_grad for parameter in self.module.parameters()]:
            raise RuntimeError(
                "requires_grad has changed since Handler wrapped the model, and DDP does not "
                "notice: set it before, or save, and go on with a new Handler that loads the file"
            )
        own = loader.sampler if isinstance(loader.sampler, loading.TrainSampler) else None
        data = {name: getattr(own, name, None) for name in ("size", "shuffle")}
        if self.samples_seen and self.data != data:
            raise ValueError(
                f"an epoch that started with {self.data} cannot go on with {data}: use the same "
                "data, shuffle and sampler, or load a checkpoint of an epoch's end"
            )
        self.data = data
        if self.samples_seen and own is None:
            why = "because only Handler's own sampler can continue in the middle of an epoch"
            warnings.warn(f"epoch {self.epoch + 1} starts again, {why}", stacklevel=4)
            self._reset_epoch()
        loader.set_seed(self.seed, self.epoch, self.rank, self.samples_seen)
        loading.seek(loader, self.epoch, self.samples_seen)
        number, batches = self._batches(), loader
        if self.steps_per_epoch:
            self._stream = self._stream or loading.endless(loader)
            batches = islice(self._stream, number)
        elif self.distributed and own is None:  # it may change with the epoch
            check_same("Handler.train", {"number of batches": number}, {}, self.device)
        if not number and not self.samples_seen:
            raise ValueError(
                f"rank {self.rank} has no batch of training data: lower batch_size, which is "
                f"{loader.batch_size}, leave out drop_last, or check the sampler"
            )
        pairs = zip(batches, loading.items_of_batches(loader), strict=False)
        return loading.in_steps(pairs, number, self.accumulate)

    def _batches(self) -> int:
        """Return how many batches the epoch has, from where the loader's sampler starts."""
        return (self.steps_per_epoch or 0) * self.accumulate or len(self._train_loader)

    def _end_epoch(self) -> None:
        """Validate, add the epoch to the history, and step a scheduler that counts epochs."""
        check_replicas(self.module, self.distributed)
        values = {f"train_{name}": value for name, value in self.running.items()}
        if self._val_loader is not None:
            batches = self._until_a_signal(self._val_loader)
            means = self._evaluate(batches, self._val_loader, self.distributed)
            values |= {f"val_{name}": value for name, value in means.items()}
        self.epoch += 1
        missed = {name: math.nan for name in self.names("val") if name in self.history}
        for name, value in (missed | values).items():
            column = self.history.setdefault(name, [])
            column += [math.nan] * (self.epoch - 1 - len(column)) + [value]
        self._reset_epoch()
        text = " | ".join(f"{name} {value:.4g}" for name, value in values.items())
        skipped = f" | {self.skipped} steps skipped" if self.skipped else ""
        self.log(f"epoch {self.epoch} | {text}{skipped}")
        with warnings.catch_warnings():  # torch cannot know that the steps came before a resume
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            if isinstance(self.scheduler, ReduceLROnPlateau):
                loss = "val_loss" if "val_loss" in values else "train_loss"
                watched = loss if self.scheduler_unit == "epoch" else str(self.scheduler_unit)
                self.scheduler.step(self.history[watched][-1])
            elif self.scheduler_unit == "epoch":
                self.scheduler.step()

    def save(self, path: str | Path) -> None:
        """Save a checkpoint, from which a run resumes as if it had never stopped.

        Never call it under `if handler.rank == 0`: rank 0 writes, but all ranks must call.

        Args:
            path: The file to write.

        Raises:
            OSError: On all ranks, if the file cannot be written.
            TypeError: On all ranks, if a checkpoint cannot contain the state of some part.
            FloatingPointError: On all ranks, if a parameter is not finite or a buffer has a NaN.
                Nothing is saved then.
            RuntimeError: On all ranks, if a parameter differs between ranks. Nothing is saved then.
        """
        check_replicas(self.module, self.distributed)
        self._save_snapshot(path)

    def _save_snapshot(self, path: str | Path) -> None:
        rng = generator_state(self.device) if self._rng is None else self._rng
        loss = self.loss_fn.state_dict() if isinstance(self.loss_fn, nn.Module) else {}
        sums = {"count": self._sums.count, "totals": self._sums.totals}
        own = models.move({"rng": rng, "loss_fn": loss} | sums, CPU)
        ranks = gather_objects(own) if self.distributed else [own]

        def write() -> None:
            parts = {name: part.state_dict() for name, part in self._parts().items()}
            parts |= {name: getattr(self, name) for name in STATE} | self._must_match()
            model = checkpoint.weights(self.module)
            checkpoint.write(path, {"model": model, "ranks": ranks} | models.move(parts, CPU))

        self._on_rank_0(write)

    def train(self, epochs: int, max_steps: int | None = None) -> None:
        """Train until `epochs` epochs have ended in total: after `load`, only the missing ones.

        The ranks first compare their settings and their data. If there is a folder for checkpoints,
        the first call also saves one there and deletes it, so that a checkpoint that cannot be
        saved is an error before training.

        Args:
            epochs: How many epochs there are in total, including those before `load`.
            max_steps: Stop after this many optimizer steps in total, also within an epoch. With its
                last step, an epoch ends as usual.

        Raises:
            ValueError: If there is no training data, or an epoch has no batch. On all ranks, if
                they differ in a setting or in their data.
            TypeError: On all ranks, if a checkpoint cannot contain the state of some part.
            RuntimeError: On all ranks, if a parameter differs between ranks at an epoch's end.
            FloatingPointError: On all ranks, if a loss or a weight is not finite.
            SystemExit: With code 143 on all ranks, after SIGTERM, SIGUSR1 or SIGHUP on any rank,
                once a checkpoint is saved.
        """
        settings.check_count("epochs", epochs, least=0)
        if max_steps is not None:
            settings.check_count("max_steps", max_steps)
        if self._train_loader is None:
            raise ValueError("there is no training data: call set_train_loader first")
        check_monitors(self)
        models.use_device(self.device)
        if self.distributed:
            loaders = {"training": self._train_loader, "validation": self._val_loader}
            known, self._compared = self._compared == loaders, loaders
            own = shared(self, epochs, max_steps)
            check_same("Handler.train", own, {} if known else loaders, self.device)
        if (folder := self.save_folder) and not self._tried_to_save:
            self._tried_to_save = True
            self.save(trial := folder / ".before_training.pt")
            self._on_rank_0(trial.unlink)
        if self.epoch >= epochs:
            self.log(f"nothing to train: {self.epoch} of {epochs} epochs have ended already")
        last_step = math.inf if max_steps is None else max_steps
        self.stopping, self._stream = False, None
        self._signals = []
        try:
            with caught_signals(self._signals):
                self._call("on_train_start")
                self._sync()
                while self.epoch < epochs and self.step < last_step and not self.stopping:
                    self._run_epoch(last_step)
                self._call("on_train_end")
        except Signalled:
            self._save_on_signal()
            raise
        finally:
            self._stream = None  # which ends the workers that read it

    def _save_on_signal(self) -> None:
        drift = None
        try:
            check_replicas(self.module, self.distributed)
        except RuntimeError as error:
            drift = error  # save first: there may be no other checkpoint
        if folder := self.save_folder:
            self._save_snapshot(path := folder / checkpoint.NAME.format(self.step))
            self.log(f"saved {path}")
        unsaved = "" if folder else ", unsaved: there is no Checkpoint callback and no run_dir"
        self.log(f"ended by a signal at step {self.step}{unsaved}")
        if drift:
            raise drift

    def stop(self) -> None:
        """Ask all ranks to stop at the next exchange; one rank is enough (not collective).

        Any thread may call it. Before `train`, it stops the next call before its first step.
        """
        self._stop = True

    def _sync(self) -> None:
        """Sum losses, stop requests and signals over all ranks, and act on them (collective)."""
        stop, self._stop = self._stop, False
        own = (self._sums.count, stop, bool(self._signals))
        count, stopped, signalled, *totals = self._add_up(own, self._sums.totals, self.distributed)
        if self.on_nonfinite == "raise" and not math.isfinite(totals[0]):
            raise FloatingPointError(
                f"a loss of epoch {self.epoch + 1} is not finite, noticed at step {self.step}: "
                'lower the learning rate, set clip_norm or on_nonfinite="skip"'
            )
        if self.samples_seen:  # before the first step, there are no means
            self.running = self._sums.means(count, totals)
        self.stopping = self.stopping or stopped > 0
        if signalled:
            raise Signalled(EXIT_CODE)

    def _add_up(self, numbers: Sequence[float], totals: Tensor, distributed: bool) -> list[float]:
        """Return numbers and totals, added up over all ranks: the only wait for the GPU."""
        # Filled on the GPU: copying them there would wait for it.
        every = torch.cat([*(totals.new_full((1,), number) for number in numbers), totals])
        if distributed:
            dist.all_reduce(every)
        return every.tolist()

    def _until_a_signal(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of validation; between two, exit on all ranks if one got a signal."""
        fewest = -(-(len(loader.dataset) // self.info.world_size) // loader.batch_size)
        meetings = range(self.sync_every, fewest, self.sync_every)
        for number, batch in enumerate(loader):
            # A rank with a signal goes to the next meeting at once, where the others learn of it.
            if self._signals or number in meetings:
                self._sync()
            yield batch
        self._sync()

    # Evaluation

    def validate(self) -> dict[str, float]:
        """Return the mean loss ("loss") and metrics over the validation set, on every rank.

        Raises:
            ValueError: If there is no validation data. On all ranks, if they have other data.
            RuntimeError: On all ranks, if a parameter differs between them.
        """
        if self._val_loader is None:
            raise ValueError("there is no validation data: call set_val_loader first")
        self._compare("Handler.validate", "validation", self._val_loader)
        self._compared["validation"] = self._val_loader
        return self._evaluate(self._val_loader, self._val_loader, self.distributed)

    def _compare(self, call: str, name: str, loader: Any) -> None:
        """Raise on all ranks if they would evaluate other data or with other parameters."""
        models.use_device(self.device)
        if self.distributed:
            own = {f"number of {name} items": len(loader.dataset)}
            known = self._compared.get(name) is loader
            check_same(call, own, {} if known else {name: loader}, self.device)
            check_replicas(self.module, self.distributed, finite=False)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss and metrics over `batches`, on this rank alone (not collective).

        Metric objects must be able to compute alone. Those of torchmetrics are.

        Args:
            batches: Batches as a loader returns them, such as a list of them or a DataLoader.
        """
        return self._evaluate(batches, batches, distributed=False)

    def _evaluate(self, batches: Iterable[Any], loader: Any, distributed: bool) -> dict[str, float]:
        if loader is self._val_loader:
            loader.set_seed(self.seed, self.epoch, self.rank)
        sums = Sums(self._functions, self.device)
        reset_objects(self._objects, distributed)
        with models.evaluating(self.model if distributed else self.module, self.device) as model:
            for batch, items in zip(batches, loading.items_of_batches(loader), strict=False):
                count = count_of(batch, items, self.count)  # `forward` may change the batch
                with self._fresh_autocast():
                    outputs, targets, loss = self._forward(model, batch)
                    sums.add(count, loss, outputs, targets)
                    for metric in self._objects.values() if count else ():
                        metric.update(outputs, targets)
        total, *totals = self._add_up([sums.count], sums.totals, distributed)
        objects = compute_objects(self._objects, sums.count > 0, distributed)
        return sums.means(total, totals) | objects

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
            On rank 0 the outputs in data-set order, on the CPU: a tensor, or a tuple or mapping of
            tensors with a row per item (an empty tensor if there are no items). Entries without
            dimensions, such as a loss, are left out.

        Raises:
            ValueError: If the model does not return one row per item. On all ranks, if they have
                other data.
            RuntimeError: On all ranks, if a parameter differs between them.
            TypeError: If it returns anything else, such as a list or a nested dict.
        """

        def outputs(model: nn.Module, batch: Any) -> Any:
            forward = self.forward
            return forward(model, batch)[0] if forward else model(_inputs_of(batch))

        return self._map("Handler.predict", outputs, data, batch_size, loader)

    def log_likelihood(
        self, data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None, **loader: Any
    ) -> Any:
        """Return `model.log_likelihood(inputs)` for `data`, in the same form as `predict`.

        Args:
            data: A data set, the same on all ranks, or an existing DataLoader of one.
            batch_size: Samples per rank and batch. Default: the existing loader's.
            **loader: Anything else that DataLoader takes, except shuffling and samplers.
        """
        method = self.module.log_likelihood

        def outputs(_: nn.Module, batch: Any) -> Any:
            return method(_inputs_of(batch))

        return self._map("Handler.log_likelihood", outputs, data, batch_size, loader)

    def _map(self, call: str, function: Any, data: Any, batch_size: Any, options: Any) -> Any:
        """Apply `function` to all batches; return its rows in data-set order on rank 0."""
        loader = self._loader(loading.eval_loader, data, batch_size, **options)
        self._compare(call, "prediction", loader)
        rows, kind = [], None
        with models.evaluating(self.model, self.device) as model:
            for batch, items in zip(loader, loading.items_of_batches(loader), strict=False):
                with self._fresh_autocast():
                    outputs = function(model, models.move(batch, self.device))
                kind = type(outputs)
                rows.append(models.rows_of(outputs, items))
        return models.gather_parts(rows, len(loader.dataset), kind, self.distributed)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Return `model.sample(*args, **kwargs)` on rank 0, None elsewhere; the others wait.

        Args:
            *args: The arguments of the model's `sample`.
            **kwargs: Its keyword arguments.
        """
        sample = self.module.sample
        with models.evaluating(self.model, self.device):
            return self._on_rank_0(lambda: sample(*args, **kwargs))

    # Figures, log, and what callbacks and users read

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
        """Pass a line to the function `log` on rank 0 (not collective).

        Args:
            text: The line.
        """
        if self.rank == 0:
            self._log(text)

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
        """Each metric's value over the training samples of each epoch; [] for metric objects."""
        return {name: self.history.get(f"train_{name}", []) for name in self.metrics}

    @property
    def val_metrics(self) -> dict[str, list[float]]:
        """Each metric's value over the validation samples of each epoch."""
        return {name: self.history.get(f"val_{name}", []) for name in self.metrics}

    @property
    def steps_left(self) -> int | None:
        """How many optimizer steps the epoch has left; None without training data."""
        if (loader := self._train_loader) is None:
            return None
        # With a TrainSampler, a loader's length is the number of batches after its start.
        start = (
            loader.sampler.samples_seen if isinstance(loader.sampler, loading.TrainSampler) else 0
        )
        taken = (self.samples_seen - start) // self._samples_per_batch
        return -(-max(0, self._batches() - taken) // self.accumulate)

    @property
    def save_folder(self) -> Path | None:
        """Where a signal saves: the folder of the last Checkpoint; None without one."""
        return next((c.folder for c in self.callbacks[::-1] if isinstance(c, Checkpoint)), None)

    # Helpers

    def _call(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)()

    def _reset_epoch(self) -> None:
        self.samples_seen, self._sums = 0, Sums(self._functions, self.device)

    def _set_rng(self) -> None:
        """Seed the generators, or set them to the loaded state, unless that has been done."""
        rng, self._rng = self._rng, None
        if isinstance(rng, tuple):
            seed_everything(*rng)
        elif rng is not None:
            set_generator_state(rng, self.device)

    def _on_rank_0(self, work: Callable[[], Any], broadcast: bool = False) -> Any:
        return on_rank(0, broadcast=broadcast)(work)() if self.distributed else work()

    def names(self, part: str) -> list[str]:
        """Return the names that an epoch adds to the history.

        Args:
            part: "train" or "val".
        """
        metrics = self.metrics if part == "val" else self._functions
        return [f"{part}_{name}" for name in ("loss", *metrics)]

    def _parts(self) -> dict[str, Any]:
        """Return the objects with a state dict, by their name in a checkpoint."""
        scaler = self._scaler if self._scaler.is_enabled() else None
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def _must_match(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the Handler that loads it must share."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "metrics": list(self._functions),
            "parts": {name: type(part).__name__ for name, part in self._parts().items()},
            "scheduler_steps_per": "step" if self.scheduler_unit == "step" else "epoch",
        }


def _inputs_of(batch: Any) -> Any:
    """Return the model's inputs: the first element of a tuple or list, else the batch itself."""
    return batch[0] if isinstance(batch, list | tuple) and batch else batch
