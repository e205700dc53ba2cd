"""Sum the loss and the metrics over samples, and count the samples."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import exchange_objects

Metric = Callable[[Any, Any], Any]


class Sums:
    """Sums over one rank's samples, in float64 on its device. Adding never waits for the device.

    They are cumulative: sharing them with other ranks does not reset them, so `sync_every` cannot
    change a mean.

    Args:
        metrics: By name, functions that return a mean over the batch.
        device: Where the loss and the metrics are computed.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self.metrics, self.count = metrics, 0.0
        self.totals = torch.zeros(1 + len(metrics), dtype=torch.float64, device=device)
        self._loss, *self._parts = self.totals.unbind()

    @torch.no_grad()
    def add(self, count: float, loss: Any, outputs: Any, targets: Any) -> None:
        """Add a batch, whose loss and metrics are means over `count` samples."""
        if count == 0:
            return  # a mean over nothing may be NaN
        self.count += count
        self._loss.add_(number("loss", loss), alpha=count)
        for total, (name, metric) in zip(self._parts, self.metrics.items(), strict=True):
            total.add_(number(name, metric(outputs, targets)), alpha=count)

    def means(self, count: float, totals: Sequence[float]) -> dict[str, float]:
        """Return the means by name; NaN if there was no sample."""
        names = ["loss", *self.metrics]
        return {n: t / count if count else math.nan for n, t in zip(names, totals, strict=True)}


def number(name: str, value: Any) -> Any:
    """Return `value` as a 0-dimensional tensor or a float; raise ValueError if it is no number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, for several elements
        raise ValueError(f"{name} must be one number: {error}") from error


def count_of(batch: Any, items: int | None, count: Callable[[Any], Any] | None) -> float:
    """Return how many samples the loss and the metrics of `batch` are means over.

    Args:
        batch: The batch as loaded.
        items: The number of items in the batch; None if it is not known.
        count: The user's function; None for the number of samples.
    """
    if count is None:
        samples = samples_in(batch)
        if items not in (None, samples):
            raise ValueError(
                f"a batch of {items} items looks like {samples} samples: pass count= to Handler"
            )
        return samples
    counted = float(number("count(batch)", count(batch)))
    if not 0 <= counted < math.inf:
        raise ValueError(f"count(batch) must be at least 0 and finite, not {counted}")
    return counted


def samples_in(batch: Any) -> int:
    """Return the first dimension of the first tensor in `batch`: in a pair, of the targets.

    A batch of PyTorch Geometric has its `num_graphs` samples.
    """
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    sizes = _sizes(batch[1]) or _sizes(batch[0]) if is_pair else _sizes(batch)
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


def weight_of(
    counts: Sequence[float], world_size: int, device: torch.device
) -> Callable[[float], Any]:
    """Return the function that weights a loss by the count of its batch.

    DDP averages the ranks' gradients as if all ranks had the same count. If counts may differ, the
    ranks add them up while the forward pass runs, and each rank scales its loss so that DDP's
    average becomes the mean over all samples.

    Args:
        counts: The counts of this rank's batches of a step.
        world_size: The number of ranks; 1 if their counts are equal.
        device: This rank's device.
    """
    own = sum(counts)
    if world_size == 1:
        return lambda count: count / own if own else 0.0
    # torch.tensor would wait for the GPU.
    total = torch.full((), float(own), dtype=torch.float64, device=device)
    work: Any = dist.all_reduce(total, async_op=True)

    def weight(count: float) -> Tensor:
        work.wait()  # on a GPU the stream waits, not the host
        return (count * world_size / total).nan_to_num(0.0)  # 0 / 0: no rank has a sample

    return weight


# Metric objects, such as those of torchmetrics


def accumulates(metric: Any) -> bool:
    """Say whether `metric` is an object that accumulates by itself, as torchmetrics' do."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def reset_objects(objects: Mapping[str, Any], distributed: bool) -> None:
    """Empty the metric objects. If not `distributed`, those of torchmetrics compute alone."""
    for metric in objects.values():
        metric.reset()
        parts: Any = metric.modules() if isinstance(metric, nn.Module) else ()
        for part in parts:
            if hasattr(part, "distributed_available_fn"):
                part.distributed_available_fn = lambda: distributed


def compute_objects(
    objects: Mapping[str, Any], has_samples: bool, distributed: bool
) -> dict[str, float]:
    """Return the value of each metric object (collective if `distributed`).

    It is NaN if no rank has a sample.

    Raises:
        ValueError: On all ranks, if only some ranks have a sample for an object of torchmetrics
            that collects lists, which cannot be gathered from a rank that has none. Or if
            `compute` does not return one number, or another number on another rank.
    """
    every = exchange_objects(has_samples) if distributed and objects else [has_samples]
    values = {}
    for name, metric in objects.items():
        if any(every) and not all(every) and _collects_lists(metric):
            raise ValueError(
                f"some ranks have no sample for metric {name!r}, which collects lists: use at "
                "least one sample per rank, or a metric that adds up numbers"
            )
        values[name] = float(number(name, metric.compute())) if any(every) else math.nan
    per_rank = exchange_objects(values) if distributed and objects else [values]
    for name in values:
        found = [each[name] for each in per_rank]
        if not np.allclose(found, found[0], rtol=1e-6, atol=0, equal_nan=True):
            raise ValueError(
                f"metric {name!r} differs between ranks, {found}: its compute() must reduce over "
                "all ranks, as those of torchmetrics do"
            )
    return per_rank[0]


def _collects_lists(metric: Any) -> bool:
    """Say whether `metric` is of torchmetrics and has a list in its state, or in a part's."""
    parts = metric.modules() if isinstance(metric, nn.Module) else []
    states = [state for part in parts for state in getattr(part, "metric_state", {}).values()]
    return any(isinstance(state, list) for state in states)
