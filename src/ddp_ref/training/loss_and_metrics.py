"""The loss and the metrics of a batch, and their running sums over an epoch."""

import copy
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..collectives import exchange_objects
from .batches import CPU, default_count, default_forward, detach, move

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
Count = Callable[[Any], int | Tensor]


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
        self.names, self.count, self.objects = list(names), 0, dict(objects or {})
        self.totals = [torch.zeros((), dtype=torch.float64, device=device) for _ in names]
        self.updated: set[str] = set()  # the objects that have seen a sample

    def add(self, count: int, measured: BatchResult) -> None:
        """Add a batch whose means are over `count` samples."""
        if count == 0:
            return  # a mean over nothing may be NaN
        self.count += count
        for total, value in zip(self.totals, measured.values, strict=True):
            total.add_(value, alpha=count)
        for metric in self.objects.values():
            metric.update(measured.outputs, measured.targets)
        self.updated.update(self.objects)

    def compute(self, distributed: bool) -> dict[str, float]:
        """Return the value of each metric object (collective if `distributed`).

        It is NaN if no rank has updated the object, as after a resume at another world size.

        Raises:
            ValueError: On all ranks, if only some ranks have updated an object. Many objects, such
                as those of torchmetrics with lists, cannot reduce over ranks then.
        """
        every = exchange_objects(self.updated) if distributed and self.objects else [self.updated]
        if any(updated != self.updated for updated in every):
            raise ValueError(
                f"some ranks have no sample for the metrics {', '.join(self.objects)}: use at "
                "least one sample per rank, or functions instead of metric objects"
            )
        values = {n: m.compute() for n, m in self.objects.items() if n in self.updated}
        return {n: _float64_copy(n, values.get(n, math.nan), CPU).item() for n in self.objects}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was added, for a checkpoint."""
        objects = {n: m.state_dict() for n, m in self.objects.items() if hasattr(m, "state_dict")}
        return {"count": self.count, "totals": torch.stack(self.totals), "objects": objects}

    def add_state(self, state: Mapping[str, Any], with_objects: bool) -> None:
        """Add what `state_dict` returned, on this rank or on another one."""
        self.count += state["count"]
        for total, value in zip(self.totals, state["totals"], strict=True):
            total += value.to(total.device)
        saved = state["objects"] if with_objects else {}
        for name, part in saved.items():
            self.objects[name].load_state_dict(move(part, self.totals[0].device))
        self.updated.update(saved if state["count"] else ())
        if self.count and (lost := ", ".join(sorted(self.objects.keys() - saved.keys()))):
            why = "have no state_dict" if with_objects else "were saved by another number of ranks"
            what = f"these metrics {why}, so this epoch's value covers only the steps after the"
            warnings.warn(f"{what} resume: {lost}", stacklevel=2)


class LossAndMetrics:
    """Compute `loss_fn(outputs, targets)` and each metric on `device`, under `autocast`.

    Args:
        loss_fn: Returns the mean loss of the batch.
        metrics: By name, functions that return a mean over the batch, or objects with `update`,
            `compute` and `reset`.
        forward: Maps (model, batch) to (outputs, targets). Default: a batch is (inputs, targets).
        count: Returns how many samples or tokens the loss is averaged over. Default: all samples.
        device: Where batches are moved before `forward` sees them.
        autocast: Returns the context of the forward pass.

    Raises:
        ValueError: If a metric is named "loss", or is a method of a metric object.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Tensor],
        metrics: Mapping[str, Any],
        forward: Forward | None,
        count: Count | None,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
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
        self.loss_fn, self.device, self.autocast = loss_fn, device, autocast
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

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
        """Run the forward pass and return the loss, the outputs and the targets."""
        with self.autocast():
            pair = self.forward(model, move(batch, self.device))
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                kind = type(pair).__name__
                raise ValueError(f"forward must return (outputs, targets), not a {kind}")
            return self.loss_fn(*pair), *pair

    def __call__(self, model: nn.Module, batch: Any) -> BatchResult:
        """Run the forward pass, the loss and the metric functions."""
        loss, outputs, targets = self.loss(model, batch)
        values = [_float64_copy("loss", loss, self.device)]
        if self.functions:
            with self.autocast(), torch.no_grad():
                for name, metric in self.functions.items():
                    values.append(_float64_copy(name, metric(outputs, targets), self.device))
        kept = (detach(outputs), targets) if self.objects else (None, None)
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
            if hasattr(metric, "distributed_available_fn"):  # torchmetrics reduces over ranks
                metric.distributed_available_fn = lambda: distributed
        return RunningSums(["loss", *self.functions], self.device, objects)


def _accumulates(metric: Any) -> bool:
    """Say whether `metric` is an object that accumulates by itself, as torchmetrics' do."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


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
