"""Train what a YAML file describes: the file, the data it splits, and Handler."""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from .callbacks import Callback, Checkpoint, EarlyStopping
from .collectives import reduce_sum
from .configuration import dump_config
from .data import length_of, shard_loader
from .decorators import on_rank
from .handler import Handler
from .initialize import DistInfo, _is_env_distributed, initialize_ddp
from .randomness import seed_everything
from .run_folder import LOG_FORMAT
from .schema import DEFAULT_STOPPING, check_config

HANDLER = (  # keys it also has
    "seed",
    "accumulate",
    "clip_norm",
    "precision",
    "on_nonfinite",
    "exchange_every",
)
FRACTION = 0.1  # of the data, for validation and for testing, where the file does not say


def setup_logging(rank: int) -> None:
    """Log to standard error as "[RANK 0] time LEVEL name: text": rank 0 from INFO, others WARNING.

    Does nothing where the program has set up logging itself.
    """
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=LOG_FORMAT.format(rank))


class TrainerDDP:
    """Train and test what the configuration `config` describes, on rank `rank` of its launch.

    Collective, as are all methods but `run_test`: all ranks call. `config` is what load_config
    returns, or a mapping like it. Opens the process group if nobody has: the launcher's, else, for
    `parallel.world_size` above 1, the one of `rank`, master_addr and master_port there. Raises
    ValueError for a key that is wrong, and for a rank or world size that is not the group's.
    """

    def __init__(self, rank: int, config: Mapping[str, Any]) -> None:
        self.config = check_config(config)
        training, parallel = self.config["training"], self.config["parallel"]
        self.info = _join(rank, parallel, training["device"])
        torch.manual_seed(training["seed"])  # the weights that a script with this line begins with
        model = _build("model", self.config["model"])
        if not isinstance(model, nn.Module):
            raise ValueError(f"model.type must make a module, not a {type(model).__name__}")
        optimizer = _build(
            "training.optimizer",
            {
                "type": training["optimizer_type"],
                "args": [model.parameters(), *training["optimizer_args"]],
                "kwargs": training["optimizer_kwargs"],
            },
        )
        self._criterion = _NotedCriterion(self.config["criterion"])
        self.handler = Handler(
            model,
            optimizer,
            self._criterion,
            metrics=self.config["metrics"],
            callbacks=[self._criterion, *self._callbacks()],
            device=training["device"],
            run_dir=training["path"],
            find_unused_parameters=parallel["find_unused_parameters"] or None,
            **{name: training[name] for name in HANDLER},
        )
        if isinstance(self._criterion.criterion, nn.Module):
            self._criterion.criterion.to(self.handler.device)
        _check_output_device(parallel["output_device"], self.handler.device)
        self._loaders: list[DataLoader[Any]] = []

    def prepare_dataloaders(self) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
        """Return the loaders for training, validation and testing.

        The first two give each rank its part, the last gives everything; `len(loader.dataset)` is
        the size of the whole split, which is drawn from training.seed, the same on all ranks.
        Raises ValueError, on all ranks, where they have data sets of different lengths.
        """
        train_set, val_set, test_set = self._datasets()
        drop_last, size = self.config["training"]["drop_last"], self._batch_size
        handler = self.handler
        handler.set_train_loader(
            train_set, size("training"), drop_last=drop_last, **self._loading("training")
        )
        handler.set_val_loader(val_set, size("validation"), **self._loading("validation"))
        test_loader = shard_loader(
            test_set, size("testing"), rank=0, world_size=1, **self._loading("testing")
        )
        assert handler.train_loader is not None and handler.val_loader is not None
        self._loaders = [handler.train_loader, handler.val_loader]
        return handler.train_loader, handler.val_loader, test_loader

    def run_training(
        self, train_loader: DataLoader[Any], val_loader: DataLoader[Any]
    ) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Train to the end, from the newest checkpoint in training.path on, where there is one.

        Return what was found in training and in validation, a dict an epoch: "loss", the metrics,
        and of validation "loss_std", over the batches of all ranks. The loaders are those of
        prepare_dataloaders, else ValueError; other errors as of Handler.load and Handler.train.
        """
        if [train_loader, val_loader] != self._loaders:
            raise ValueError(
                "run_training takes the two loaders that prepare_dataloaders returned, which give "
                "each rank its part: put other data into the configuration"
            )
        handler, path = self.handler, self.config["training"]["path"]
        handler.val_loader = val_loader if len(val_loader.dataset) else None  # type: ignore[arg-type]
        if path is not None:
            handler.load(path)
            self._check_goes_on(len(train_loader.dataset))  # type: ignore[arg-type]
            on_rank(0)(dump_config)(self.config, Path(path) / "config.yaml")
        handler.train(self.config["training"]["num_epochs"])
        names = ["loss", *handler.metrics]
        return self._results("train", names), self._results("val", [*names, "loss_std"])

    def run_test(self, test_loader: Iterable[Any]) -> dict[str, float]:
        """Return "loss", the metrics and "loss_std" over all of `test_loader`: not collective.

        Only the rank that calls works, with the model as it is on that rank.
        """
        self._criterion.noted.clear()
        results = self.handler.evaluate(test_loader)
        results["loss_std"] = self._criterion.spread(together=False)
        self.handler.log(_in_words("Test", results["loss"], results["loss_std"]))
        return results

    def _check_goes_on(self, samples: int) -> None:
        """Raise ValueError, or warn, where what was loaded is not of this configuration."""
        handler = self.handler
        if handler.step == 0:
            return
        if handler.trained_on not in (None, samples):
            raise ValueError(
                f"the checkpoint is of a run on {handler.trained_on} samples, now there are "
                f"{samples}: with another split test items would be trained on; give the same data "
                "and fractions, or another training.path"
            )
        group = handler.optimizer.param_groups[0]
        for name, value in self.config["training"]["optimizer_kwargs"].items():
            if handler.rank == 0 and name in group and group[name] != value:
                warnings.warn(
                    f"training.optimizer_kwargs.{name} is {value}, but the checkpoint goes on with "
                    f"{group[name]}",
                    stacklevel=3,
                )

    def _callbacks(self) -> list[Callback]:
        training, found = self.config["training"], []
        if stopping := self.config["early_stopping"]:
            default = stopping["type"] == DEFAULT_STOPPING
            kind = EarlyStopping if default else stopping["type"]
            found.append(_build("early_stopping", stopping | {"type": kind}))
            if not isinstance(found[0], Callback):
                made = type(found[0]).__name__
                raise ValueError(f"early_stopping.type must make a Callback, not a {made}")
        if training["path"] is not None:
            found.append(Checkpoint(training["path"], every_epochs=training["checkpoint_at"]))
        return found

    def _datasets(self) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any]]:
        """Return the data for training, validation and testing, the same on all ranks."""
        seed = self.config["training"]["seed"]
        seed_everything(seed)  # a data set that draws numbers draws the same on all ranks
        whole = _build("data", self.config["data"])
        size = length_of(whole)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
        held_out: list[Dataset[Any]] = []
        for name in ("validation", "testing"):
            section = self.config[name]
            if section["data"]:
                held_out.append(_build(f"{name}.data", section["data"]))
                continue
            fraction = FRACTION if section["fraction"] is None else section["fraction"]
            number = round(fraction * size)
            held_out.append(Subset(whole, order[:number]))
            order = order[number:]
        train_set = whole if len(order) == size else Subset(whole, sorted(order))
        return train_set, held_out[0], held_out[1]

    def _batch_size(self, name: str) -> int:
        return self.config[name]["batch_size"] or self.config["training"]["batch_size"]

    def _loading(self, name: str) -> dict[str, Any]:
        section = self.config[name]
        return {
            "num_workers": section["num_workers"],
            "prefetch_factor": section["prefetch_factor"],
            "persistent_workers": section["num_workers"] > 0,  # to start them takes seconds
            # It speeds up copies to a GPU; without one, torch warns of it.
            "pin_memory": section["pin_memory"] and self.handler.device.type == "cuda",
        }

    def _results(self, part: str, names: Sequence[str]) -> list[dict[str, float]]:
        columns = [self.handler.history.get(f"{part}_{name}", []) for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


class _NotedCriterion(Callback):
    """The criterion, which notes the loss of each batch in validation and tells their spread."""

    def __init__(self, criterion: Callable[..., Any]) -> None:
        is_class = isinstance(criterion, type) and issubclass(criterion, nn.Module)
        self.criterion = criterion() if is_class else criterion
        self.noted: list[Tensor] = []
        self.__qualname__ = getattr(criterion, "__qualname__", repr(criterion))

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        loss = self.criterion(outputs, targets)
        if not torch.is_grad_enabled():
            self.noted.append(loss.detach().double())
        return loss

    def on_epoch_start(self) -> None:
        self.noted.clear()

    def on_epoch_end(self) -> None:
        handler = self.handler
        spread = self.spread(together=True)  # NaN where nothing was validated
        if handler.val_losses:
            spreads = handler.history.setdefault("val_loss_std", [])
            spreads += [math.nan] * (len(handler.val_losses) - 1 - len(spreads)) + [spread]
        if handler.val_loader is None:
            return
        handler.log(_in_words("Validation", handler.val_losses[-1], spread))

    def spread(self, together: bool) -> float:
        """Return the standard deviation over what was noted, `together` on all ranks."""
        losses = torch.stack(self.noted) if self.noted else torch.zeros(0)
        found = {"sum": losses.sum().item(), "squares": losses.square().sum().item()}
        found["batches"] = len(losses)
        if together:
            found = reduce_sum(found, names=list(found))
        if not found["batches"]:
            return math.nan
        mean, square = found["sum"] / found["batches"], found["squares"] / found["batches"]
        return math.sqrt(max(square - mean**2, 0.0))  # NaN, which is first, stays


def _in_words(what: str, loss: float, spread: float) -> str:
    return f"{what}: loss={loss:.3f} ± {spread:.3f}"


def _build(name: str, section: Mapping[str, Any]) -> Any:
    try:
        return section["type"](*section["args"], **section["kwargs"])
    except TypeError as error:
        raise TypeError(f"{name} cannot be made from its args and kwargs: {error}") from error


def _join(rank: int, parallel: Mapping[str, Any], device: str | None) -> DistInfo:
    """Open the group, or find it open, and check that it is the one that was described."""
    if parallel["rank"] not in (None, rank):
        raise ValueError(f"parallel.rank is {parallel['rank']}, but TrainerDDP got rank {rank}")
    backend, world_size = "gloo" if device == "cpu" else None, parallel["world_size"]
    seconds = parallel["timeout"]
    timeout = None if seconds is None else timedelta(seconds=seconds)
    if world_size in (None, 1) or dist.is_initialized() or _is_env_distributed():
        info = initialize_ddp(timeout, backend=backend)
    else:
        info = initialize_ddp(
            timeout,
            rank=rank,
            world_size=world_size,
            master_addr=parallel["master_addr"],
            master_port=parallel["master_port"],
            backend=backend,
        )
    if rank != info.rank:
        raise ValueError(f"TrainerDDP got rank {rank}, but this process is rank {info.rank}")
    if world_size not in (None, info.world_size):
        raise ValueError(
            f"parallel.world_size is {world_size}, but the launcher started {info.world_size}: "
            "set it to null"
        )
    return info


def _check_output_device(index: int | None, device: torch.device) -> None:
    if index not in (None, device.index):
        raise ValueError(
            f"parallel.output_device is {index}, but this rank computes on {device}: set it to null"
        )
