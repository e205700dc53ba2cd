"""The loss and the metrics of a batch, and their running sums over an epoch."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import exchange_objects
from .model import detach, move
from .rank_sync import RankSync

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
Count = Callable[[Any], float | Tensor]
LossFunction = Callable[[Any, Any], Tensor]


class RunningSums:
    """Sums over one rank's samples, in float64 on its device. Adding never waits for the device.

    The sums are cumulative: they are never reset when the ranks synchronize, so the sync interval
    cannot change a mean.

    Args:
        metrics: By name, functions that return a mean over the batch, or objects with `update`,
            `compute` and `reset`.
        device: Where the loss and the metrics are computed.
        distributed: Whether the values are over the samples of all ranks.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        device: torch.device,
        distributed: bool,
    ) -> None:
        objects = {name: metric for name, metric in metrics.items() if _accumulates(metric)}
        self.functions = {n: metric for n, metric in metrics.items() if n not in objects}
        self.distributed, self.count = distributed, 0.0
        self.names = ["loss", *self.functions]
        self.totals = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        # Of the batches that `commit` has not counted yet, because their step may be left out.
        self._new_count, self._new_totals = 0.0, torch.zeros_like(self.totals)
        self._new_batches: list[tuple[Any, Any]] = []
        self._parts = self._new_totals.unbind()
        # Training and validation need objects of their own: an epoch of validation must not reset
        # what the epoch of training has seen.
        self.objects: dict[str, Any] = copy.deepcopy(objects)
        self.updated: set[str] = set()  # the objects that have seen a sample
        for metric in self.objects.values():
            metric.reset()
            if hasattr(metric, "persistent"):  # torchmetrics: put the state into state_dict()
                metric.persistent(True)
            parts: Any = metric.modules() if isinstance(metric, nn.Module) else ()
            for part in parts:
                if hasattr(part, "distributed_available_fn"):  # torchmetrics reduces over ranks
                    part.distributed_available_fn = lambda: distributed

    def add(self, count: float, loss: Any, outputs: Any, targets: Any) -> None:
        """Keep a batch for `commit`; its loss and metrics are means over `count` samples."""
        if count == 0:
            return  # a mean over nothing may be NaN
        self._new_count += count
        _add("loss", self._parts[0], loss, count)
        with torch.no_grad():
            for total, (name, metric) in zip(self._parts[1:], self.functions.items(), strict=True):
                _add(name, total, metric(outputs, targets), count)
        if self.objects:
            self._new_batches.append((detach(outputs), targets))

    def commit(self) -> None:
        """Count the batches that were added since the last `commit` or `discard`."""
        self.count += self._new_count
        self.totals += self._new_totals
        for outputs, targets in self._new_batches:
            for metric in self.objects.values():
                metric.update(outputs, targets)
            self.updated.update(self.objects)
        self.discard()

    def discard(self) -> None:
        """Forget the batches that were added since the last `commit` or `discard`."""
        self._new_count = 0.0
        self._new_totals.zero_()
        self._new_batches.clear()

    def compute(self) -> dict[str, float]:
        """Return the value of each metric object (collective if distributed).

        It is NaN if no rank has a sample for it, as after a resume at another world size.

        Raises:
            ValueError: On all ranks, if only some ranks have a sample for an object of torchmetrics
                that collects lists, which cannot be gathered from a rank that has none. Or if
                `compute` does not return one number.
        """
        shared = self.distributed and self.objects
        every = exchange_objects(self.updated) if shared else [self.updated]
        values = {}
        for name, metric in self.objects.items():
            updated = [name in names for names in every]
            if any(updated) and not all(updated) and _collects_lists(metric):
                raise ValueError(
                    f"some ranks have no sample for metric {name!r}, which collects lists: use at "
                    "least one sample per rank, or a metric that adds up numbers"
                )
            values[name] = float(_number(name, metric.compute()) if any(updated) else math.nan)
        return values

    def means(self) -> dict[str, float]:
        """Return the means over the samples of all ranks (collective if distributed)."""
        sync = RankSync(self.totals.device, self.distributed)
        sync.start(self.count, self.totals)
        return self.named(sync.finish().means)  # type: ignore[union-attr]  # not None after `start`

    def named(self, values: Iterable[float]) -> dict[str, float]:
        """Return the means of a summary of these sums by name."""
        return dict(zip(self.names, values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was added, for a checkpoint."""
        objects = {n: m.state_dict() for n, m in self.objects.items() if hasattr(m, "state_dict")}
        return {"count": self.count, "totals": self.totals.clone(), "objects": objects}

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], same_ranks: bool) -> None:
        """Add what `state_dict` returned, on this rank or, if the world size changed, on others.

        Args:
            states: This rank's share of the states.
            same_ranks: Whether the number of ranks is the same, so that objects can load theirs.
        """
        for state in states:
            self.count += state["count"]
            self.totals += state["totals"].to(self.totals.device)
            saved = state["objects"] if same_ranks else {}
            for name, part in saved.items():
                self.objects[name].load_state_dict(move(part, self.totals.device))
            self.updated.update(saved if state["count"] else ())
            if self.count and (lost := ", ".join(sorted(self.objects.keys() - saved.keys()))):
                why = "have no state_dict" if same_ranks else "were saved by other ranks"
                what = f"these metrics {why}, so this epoch's value covers only the steps after the"
                warnings.warn(f"{what} resume: {lost}", stacklevel=2)


class FreshAutocast(torch.autocast):
    """An autocast that casts the weights again, also inside the caller's own autocast.

    torch keeps the cast weights until the outermost autocast ends, even if an optimizer has
    changed the weights since.
    """

    def __enter__(self) -> Any:
        torch.clear_autocast_cache()
        return torch.autocast.__enter__(self)


class LossAndMetrics:
    """How a batch becomes outputs, a loss, metrics and a number of samples.

    Args:
        loss_fn: Returns the mean loss of the batch.
        metrics: By name, functions that return a mean over the batch, or objects with `update`,
            `compute` and `reset`.
        forward: Maps (model, batch) to (outputs, targets). Default: a batch is (inputs, targets).
        count: Returns how many samples or tokens the loss is averaged over. Default: all samples.
        device: Where to compute.
        precision: The autocast dtype of the forward pass, the loss and the metrics. None turns
            autocast off, even the caller's.

    Raises:
        ValueError: If a metric is named "loss", or is a method of a metric object.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        metrics: Mapping[str, Any],
        forward: Forward | None,
        count: Count | None,
        device: torch.device,
        precision: torch.dtype | None,
    ) -> None:
        if "loss" in metrics:
            raise ValueError('a metric cannot be named "loss": choose another name')
        for name, metric in metrics.items():
            owner = getattr(inspect.unwrap(metric), "__self__", None)
            if _accumulates(metric if isinstance(metric, type) else owner):
                raise ValueError(
                    f"metric {name!r} is {metric!r:.60}, a class or a method: pass a metric object"
                )
        for part in (loss_fn, *metrics.values()):
            if isinstance(part, nn.Module):  # it may have class weights, or a metric's state
                part.to(device)
        self.loss_fn, self.metrics, self.device = loss_fn, metrics, device
        self._count = count
        self._forward = forward or default_forward
        #: for a forward pass and its loss, but not for the loader, because data sets may compute
        self.autocast = FreshAutocast(device.type, precision, enabled=precision is not None)
        self.counts_may_differ = count is not None  # in batches of the same size

    def forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Move the batch to the device and run the model; return its outputs and the targets."""
        pair = self._forward(model, move(batch, self.device))
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"forward must return (outputs, targets), not a {type(pair).__name__}")
        return pair[0], pair[1]

    def count(self, batch: Any, items: int | None) -> float:
        """Return how many samples the means of `batch` are over.

        Args:
            batch: The batch as loaded.
            items: The number of items in the batch; None if it is not known.
        """
        if self._count is None:
            samples = samples_in(batch)
            if items not in (None, samples):
                raise ValueError(
                    f"a batch of {items} items looks like {samples} samples: pass count= to Handler"
                )
            return samples
        value = self._count(batch)
        try:
            count = float(value)
        except (TypeError, ValueError, RuntimeError):  # such as a tensor with several elements
            count = -1
        if not 0 <= count < math.inf:
            raise ValueError(f"count(batch) must be a number of at least 0, not {value!r:.60}")
        return count

    def new_sums(self, distributed: bool) -> RunningSums:
        """Return empty sums."""
        return RunningSums(self.metrics, self.device, distributed)


def default_forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Feed the model the first part of an (inputs, targets) batch; return outputs and targets."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise ValueError(
            f"a batch must be (inputs, targets), not a {type(batch).__name__}{size}: pass forward= "
            "to Handler, or give the loader a collate_fn that returns pairs"
        )
    return model(batch[0]), batch[1]


def samples_in(batch: Any) -> int:
    """Return the first dimension of the first tensor in `batch`: in a pair, of the targets.

    A batch of PyTorch Geometric has its `num_graphs` samples.
    """
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    sizes = _sizes(batch[1]) + _sizes(batch[0]) if is_pair else _sizes(batch)
    if not sizes:
        raise ValueError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} has: pass count= "
            "to Handler, or give the loader a collate_fn that returns tensors"
        )
    if not sizes[0]:
        raise ValueError("a batch has no samples: make the collate_fn keep at least one")
    return sizes[0]


def _sizes(value: Any) -> list[int]:
    """Return the first dimension of each tensor in `value`."""
    if isinstance(value, Tensor):
        return [len(value)] if value.dim() else []
    if isinstance(graphs := getattr(value, "num_graphs", None), int):
        return [graphs]
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list | tuple):
        return [size for part in parts for size in _sizes(part)]
    return []


def _accumulates(metric: Any) -> bool:
    """Say whether `metric` is an object that accumulates by itself, as torchmetrics' do."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _collects_lists(metric: Any) -> bool:
    """Say whether `metric` is of torchmetrics and has a list in its state, or in a part's."""
    parts = metric.modules() if isinstance(metric, nn.Module) else []
    states = [state for part in parts for state in getattr(part, "metric_state", {}).values()]
    return any(isinstance(state, list) for state in states)


def _add(name: str, total: Tensor, value: Any, count: float) -> None:
    """Add `count * value` to `total`, on its device and in its precision."""
    total.add_(_number(name, value), alpha=count)


def _number(name: str, value: Any) -> Any:
    """Return `value` as a 0-dimensional tensor or a float; raise ValueError if it is no number."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return value.detach().reshape(())
    else:
        with suppress(TypeError, ValueError):
            return float(value)
    what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(f"{name} must be one number, such as a mean, not {what}")
