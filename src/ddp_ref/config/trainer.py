"""TrainerDDP: build the data, the model and a Handler from a configuration, and train."""

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from ..collectives import reduce_mean
from ..handler import Handler
from ..initialize import DistInfo, _is_env_distributed, initialize_ddp
from ..randomness import seed_everything
from ..training.callbacks import Callback, Checkpoint, EarlyStopping
from ..training.data import eval_loader, length_of, length_or_none, train_loader
from ..training.run_folder import LOG_FORMAT
from .schema import DEFAULT_STOPPING, HANDLER, check_config

FRACTION = 0.1  # share of the data for validation, and for testing, by default


def setup_logging(rank: int) -> None:
    """Log to standard error as "[RANK 0] time LEVEL name: text".

    Rank 0 logs from INFO, the other ranks from WARNING. If the program has set up logging already,
    this does nothing.

    Args:
        rank: This process's rank.
    """
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=LOG_FORMAT.format(rank))


class TrainerDDP:
    """Train and test the model that a configuration describes.

    The constructor and all methods are collective, so all ranks call them, except `run_test`. If
    no process group is open, the constructor opens one: the launcher's, or, without a launcher and
    with `parallel.world_size` above 1, the one at `parallel.master_addr` and `master_port`.

    Args:
        rank: This process's rank.
        config: What `load_config` returns, or a mapping with the same keys.

    Raises:
        ValueError: If a key is wrong, or the rank or world size is not that of the group.
    """

    def __init__(self, rank: int, config: Mapping[str, Any]) -> None:
        self.config = check_config(config)
        training, parallel, metrics = (self.config[n] for n in ("training", "parallel", "metrics"))
        self.info = _join(rank, parallel, training["device"])
        torch.manual_seed(training["seed"])  # the same initial weights as a script with this line
        model = _build("model", self.config["model"], kind=nn.Module)
        keys = {key: training[f"optimizer_{key}"] for key in ("type", "args", "kwargs")}
        optimizer = _build("training.optimizer", keys, model.parameters())
        scheduler, unused = training["scheduler"], parallel["find_unused_parameters"]
        if scheduler:
            scheduler = _build("training.scheduler", scheduler, optimizer), scheduler["every"]
        self._criterion = _RecordedCriterion(self.config["criterion"])
        self.handler = Handler(
            model,
            optimizer,
            self._criterion,
            metrics={n: m() if isinstance(m, type) else m for n, m in metrics.items()},
            scheduler=scheduler,
            callbacks=[self._criterion, *self._callbacks()],
            device=training["device"],
            run_dir=training["path"],
            ddp_options={} if unused is None else {"find_unused_parameters": unused},
            **{name: training[name] for name in HANDLER},
        )
        if isinstance(self._criterion.criterion, nn.Module):
            self._criterion.criterion.to(self.handler.device)

    def prepare_dataloaders(self) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
        """Return the loaders for training, validation and testing.

        The split depends only on `training.seed`, so it is the same on all ranks. The first two
        loaders give each rank its shard, the third gives every rank the whole test set.
        `len(loader.dataset)` is the size of the whole split.
        """
        train_set, val_set, test_set = self._datasets()
        order = {name: self.config["training"][name] for name in ("seed", "drop_last")}
        return (
            train_loader(train_set, **order, **self._loading("training")),
            eval_loader(val_set, **self._loading("validation")),
            eval_loader(test_set, rank=0, world_size=1, **self._loading("testing")),
        )

    def run_training(
        self, train_loader: DataLoader[Any], val_loader: DataLoader[Any]
    ) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Train to the end, starting from the newest checkpoint in `training.path`, if any.

        Args:
            train_loader: The training loader from `prepare_dataloaders`, or another one of data
                with a length, as `Handler.set_train_loader` takes it.
            val_loader: The validation loader from `prepare_dataloaders`, or another one, as
                `Handler.set_val_loader` takes it. If it is empty, nothing is validated.

        Returns:
            The results of training and of validation, one dict per epoch, with "loss" and the
            metrics. Validation also has "loss_std", the standard deviation over all ranks' batches.

        Raises:
            ValueError: If the checkpoint does not fit, or, on all ranks, if the length of the data
                differs between ranks.
            Exception: Other errors as in `Handler.load` and `Handler.train`.
        """
        handler, path = self.handler, self.config["training"]["path"]
        handler.train_loader = train_loader
        handler.val_loader = None if length_or_none(val_loader.dataset) == 0 else val_loader
        if path is not None:
            fresh = {**handler.optimizer.param_groups[0]}
            handler.load(path)
            self._check_checkpoint_fits(length_or_none(train_loader.dataset), fresh)
        handler.train(self.config["training"]["num_epochs"])
        names = ["loss", *handler.metrics]
        return self._results("train", names), self._results("val", [*names, "loss_std"])

    def run_test(self, test_loader: Iterable[Any]) -> dict[str, float]:
        """Return "loss", the metrics and "loss_std" over `test_loader` (not collective).

        Only the calling rank computes, with its own copy of the model.

        Args:
            test_loader: The third loader of `prepare_dataloaders`, or your own.
        """
        self._criterion.losses.clear()
        results = self.handler.evaluate(test_loader)
        results["loss_std"] = self._criterion.spread(together=False)
        self.handler.log(f"Test: loss={results['loss']:.3f} ± {results['loss_std']:.3f}")
        return results

    def _check_checkpoint_fits(self, samples: int | None, fresh: Mapping[str, Any]) -> None:
        """Raise ValueError, or warn, if the loaded checkpoint does not fit this configuration.

        `fresh` is the optimizer's first parameter group before the load.
        """
        before = self.handler.state.data.get("samples")
        if before not in (None, samples):
            # With another split, items of the test set could be trained on.
            raise ValueError(
                f"the checkpoint is from a run on {before} training samples, but now there are "
                f"{samples}: use the same data and fractions, or another training.path"
            )
        group, wanted = self.handler.optimizer.param_groups[0], self.config["training"]
        for name, value in wanted["optimizer_kwargs"].items() if self.handler.step else ():
            # A scheduler changes the value, and keeps the initial one under another name. Some
            # schedulers, such as OneCycleLR, replace both, so that the value has no effect.
            saved, now = (own.get(f"initial_{name}", own.get(name)) for own in (group, fresh))
            if now == value != saved and self.info.rank == 0:
                key = f"training.optimizer_kwargs.{name}"
                warnings.warn(f"{key} is {value}, but the checkpoint has {saved}", stacklevel=3)

    def _callbacks(self) -> list[Callback]:
        parts = {f"callbacks[{n}]": part for n, part in enumerate(self.config["callbacks"])}
        if stopping := self.config["early_stopping"]:
            default = {"type": EarlyStopping} if stopping["type"] == DEFAULT_STOPPING else {}
            parts["early_stopping"] = stopping | default
        callbacks = [_build(name, part, kind=Callback) for name, part in parts.items()]
        if (path := self.config["training"]["path"]) is not None:
            callbacks.append(Checkpoint(path, self.config["training"]["checkpoint_at"]))
        return callbacks

    def _datasets(self) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any]]:
        """Return the data sets for training, validation and testing, the same on all ranks."""
        seed = self.config["training"]["seed"]
        seed_everything(seed)  # random data sets are then the same on all ranks
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

    def _loading(self, name: str) -> dict[str, Any]:
        section, training = self.config[name], self.config["training"]
        return {
            "batch_size": section["batch_size"] or training["batch_size"],
            "collate_fn": training["collate_fn"],
            "num_workers": section["num_workers"],
            "prefetch_factor": section["prefetch_factor"],
            "persistent_workers": section["num_workers"] > 0,  # starting them takes seconds
            # Pinned memory speeds up copies to a GPU. Without a GPU, torch warns.
            "pin_memory": section["pin_memory"] and self.handler.device.type == "cuda",
        }

    def _results(self, part: str, names: Sequence[str]) -> list[dict[str, float]]:
        columns = [self.handler.history.get(f"{part}_{name}", []) for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


class _RecordedCriterion(Callback):
    """Wrap the criterion and record each validation batch's loss, for their standard deviation."""

    def __init__(self, criterion: Callable[..., Any]) -> None:
        self.criterion = criterion() if isinstance(criterion, type) else criterion
        self.losses: list[Tensor] = []
        self.__qualname__ = getattr(criterion, "__qualname__", repr(criterion))

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        loss = self.criterion(outputs, targets)
        if not torch.is_grad_enabled():
            self.losses.append(loss.detach().double())
        return loss

    def _history_names(self) -> list[str]:
        return ["val_loss_std"]

    def on_epoch_end(self) -> None:
        handler = self.handler
        # Another callback may have validated in the middle of the epoch.
        self.losses = self.losses[len(self.losses) - len(handler.val_loader or ()) :]
        spread = self.spread(together=True)
        if handler.val_losses:
            handler.state.record({"val_loss_std": spread}, [])
        if handler.val_loader:
            handler.log(f"Validation: loss={handler.val_losses[-1]:.3f} ± {spread:.3f}")

    def spread(self, together: bool) -> float:
        """Return the standard deviation of the recorded losses; if `together`, over all ranks.

        Without losses it is NaN.
        """
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0).double()
        means = {"loss": losses.mean(), "square": losses.square().mean()}
        if together:
            means = reduce_mean(means, count=len(losses))
        return (means["square"] - means["loss"] ** 2).clamp(min=0).sqrt().item()


def _build(name: str, section: Mapping[str, Any], *first: Any, kind: type = object) -> Any:
    try:
        made = section["type"](*first, *section["args"], **section["kwargs"])
    except TypeError as error:
        raise TypeError(f"{name} cannot be created from its args and kwargs: {error}") from error
    if not isinstance(made, kind):
        raise ValueError(f"{name}.type must create a {kind.__name__}, not a {type(made).__name__}")
    return made


def _join(rank: int, parallel: Mapping[str, Any], device: str | None) -> DistInfo:
    """Open the group unless it is open, and check that it is the one in the configuration."""
    seconds, world_size = parallel["timeout"], parallel["world_size"]
    timeout = None if seconds is None else timedelta(seconds=seconds)
    place: dict[str, Any] = {}
    if not (world_size in (None, 1) or _is_env_distributed()):
        place = {n: parallel[n] for n in ("world_size", "master_addr", "master_port")}
        place["rank"] = rank
    info = initialize_ddp(timeout, backend="gloo" if device == "cpu" else None, **place)
    for name, given in (("rank", rank), ("parallel.rank", parallel["rank"])):
        if given not in (None, info.rank):
            raise ValueError(f"{name} is {given}, but this process is rank {info.rank}")
    if world_size not in (None, info.world_size):
        raise ValueError(
            f"parallel.world_size is {world_size}, but {info.world_size} ranks run: set it to null"
        )
    return info
