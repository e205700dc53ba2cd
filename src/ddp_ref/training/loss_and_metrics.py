"""The loss and the metrics of a batch, and their running sums over an epoch."""

import copy
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..collectives import exchange_objects
from .batches import CPU, default_count, default_forward, detach, move

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
Count = Callable[[Any], int | Tensor]
LossFunction = Callable[[Any, Any], Tensor]


class BatchResult(NamedTuple):
    """What one batch gives: the loss for backward, and what the epoch's means need."""

    loss: Tensor
    values: list[Tensor]  # the loss and the metrics, as float64 copies on the device
    outputs: Any  # for metric objects; None if there are none
    targets: Any


class RunningSums:
    """Sums over one rank's samples, in float64 on its device. Adding never waits for the device.

    The sums are cumulative: they are never reset when the ranks synchronize, so the sync interval
    cannot change a mean.
    """

    def __init__(
        self, names: Sequence[str], device: torch.device, objects: Mapping[str, Any] | None = None
    ) -> None:
        self.names, self.objects = list(names), dict(objects or {})
        self.count = 0
        self.totals = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.updated: set[str] = set()  # the objects that have seen a sample

    def add(self, count: int, measured: BatchResult) -> None:
        """Add a batch whose means are over `count` samples."""
        if count == 0:
            return  # a mean over nothing may be NaN
        self.count += count
        self.totals.add_(torch.stack(measured.values), alpha=count)
        for metric in self.objects.values():
            metric.update(measured.outputs, measured.targets)
        self.updated.update(self.objects)

    def compute(self, distributed: bool) -> dict[str, float]:
        """Return the value of each metric object (collective if `distributed`).

        It is NaN if no rank has updated the object, as after a resume at another world size.

        Raises:
            ValueError: On all ranks, if only some ranks have updated an object of torchmetrics
                that collects lists, which cannot be gathered from a rank that has none.
        """
        every = exchange_objects(self.updated) if distributed and self.objects else [self.updated]
        values = {}
        for name, metric in self.objects.items():
            updated = [name in names for names in every]
            if any(updated) and not all(updated) and _collects_lists(metric):
                raise ValueError(
                    f"some ranks have no sample for metric {name!r}, which collects lists: use at "
                    "least one sample per rank, or a metric that adds up numbers"
                )
            value = metric.compute() if any(updated) else math.nan
            values[name] = _float64_copy(name, value, CPU).item()
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was added, for a checkpoint."""
        objects = {n: m.state_dict() for n, m in self.objects.items() if hasattr(m, "state_dict")}
        return {"count": self.count, "totals": self.totals.clone(), "objects": objects}

    def add_state(self, state: Mapping[str, Any], with_objects: bool) -> None:
        """Add what `state_dict` returned, on this rank or on another one."""
        self.count += state["count"]
        self.totals += state["totals"].to(self.totals.device)
        saved = state["objects"] if with_objects else {}
        for name, part in saved.items():
            self.objects[name].load_state_dict(move(part, self.totals.device))
        self.updated.update(saved if state["count"] else ())
        if self.count and (lost := ", ".join(sorted(self.objects.keys() - saved.keys()))):
            why = "have no state_dict" if with_objects else "were saved by another number of ranks"
            what = f"these metrics {why}, so this epoch's value covers only the steps after the"
            warnings.warn(f"{what} resume: {lost}", stacklevel=2)


class LossAndMetrics:
    """Compute `loss_fn(outputs, targets)` and each metric on the Handler's device.

    Args:
        handler: The Handler, for its device, precision and metrics: by name, functions that return
            a mean over the batch, or objects with `update`, `compute` and `reset`.
        loss_fn: Returns the mean loss of the batch.
        forward: Maps (model, batch) to (outputs, targets). Default: a batch is (inputs, targets).
        count: Returns how many samples or tokens the loss is averaged over. Default: all samples.

    Raises:
        ValueError: If a metric is named "loss", or is a method of a metric object.
    """

    def __init__(
        self, handler: Any, loss_fn: LossFunction, forward: Forward | None, count: Count | None
    ) -> None:
        metrics = handler.metrics
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
                part.to(handler.device)
        self.loss_fn, self.device = loss_fn, handler.device
        self.autocast = handler.optimizer_step.autocast
        self.functions = {n: metric for n, metric in metrics.items() if not _accumulates(metric)}
        self.objects = {n: metric for n, metric in metrics.items() if _accumulates(metric)}
        self.forward, self.has_count = forward or default_forward, count is not None
        self._count = count or default_count

    def count(self, batch: Any) -> int:
        """Return how many samples the means of `batch` are over."""
        value = self._count(batch)
        try:
            count = operator.index(value)
        except TypeError:  # a float, or a tensor with several elements
            count = -1
        if count < 0:
            raise ValueError(f"count(batch) must be an integer of at least 0, not {value!r:.60}")
        if count == 0 and not self.has_count:
            raise ValueError("a batch has no samples: make the collate_fn keep at least one")
        return count

    def __call__(self, model: nn.Module, batch: Any) -> BatchResult:
        """Run the forward pass, the loss and the metric functions."""
        with self.autocast():
            pair = self.forward(model, move(batch, self.device))
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                kind = type(pair).__name__
                raise ValueError(f"forward must return (outputs, targets), not a {kind}")
            loss = self.loss_fn(*pair)
            values = [_float64_copy("loss", loss, self.device)]
            with torch.no_grad():
                for name, metric in self.functions.items():
                    values.append(_float64_copy(name, metric(*pair), self.device))
        kept = (detach(pair[0]), pair[1]) if self.objects else (None, None)
        return BatchResult(loss, values, *kept)

    def new_sums(self, distributed: bool) -> RunningSums:
        """Return empty sums, with copies of the metric objects.

        Training and validation need objects of their own: an epoch of validation must not reset
        what the epoch of training has seen.
        """
        objects = copy.deepcopy(self.objects)
        for metric in objects.values():
            metric.reset()
            if hasattr(metric, "persistent"):  # torchmetrics: put the state into state_dict()
                metric.persistent(True)
            parts: Any = metric.modules() if isinstance(metric, nn.Module) else ()
            for part in parts:  # some metrics contain others
                if hasattr(part, "distributed_available_fn"):  # torchmetrics reduces over ranks
                    part.distributed_available_fn = lambda: distributed
        return RunningSums(["loss", *self.functions], self.device, objects)


def _accumulates(metric: Any) -> bool:
    """Say whether `metric` is an object that accumulates by itself, as torchmetrics' do."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _collects_lists(metric: Any) -> bool:
    """Say whether `metric` is of torchmetrics and has a list in its state, or in a part's."""
    parts = metric.modules() if isinstance(metric, nn.Module) else []
    states = [state for part in parts for state in getattr(part, "metric_state", {}).values()]
    return any(isinstance(state, list) for state in states)


def _float64_copy(name: str, value: Any, device: torch.device) -> Tensor:
    """Return one number as a float64 tensor; a copy, because a metric may reuse its tensor."""
    try:
        if not isinstance(value, Tensor):
            # torch.tensor would wait for the GPU.
            return torch.full((), float(value), dtype=torch.float64, device=device)
        return value.detach().to(device, torch.float64, copy=True).reshape(())
    except (TypeError, RuntimeError, ValueError) as error:
        what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} must be one number, such as a mean, not {what}") from error
