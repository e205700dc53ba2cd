"""Evaluate a model, each rank on its shard, and bring the outputs into data-set order."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..collectives import exchange_objects, gather_objects, move_tensor
from .batches import CPU, move, use_device
from .loss_and_metrics import LossAndMetrics
from .rank_sync import all_means


@contextmanager
def evaluating(model: nn.Module, device: torch.device, distributed: bool) -> Iterator[None]:
    """Put `model` into eval mode, without gradients and with rank 0's buffers (collective).

    BatchNorm's buffers differ between ranks, because each rank has seen its own samples.
    """
    use_device(device)
    if distributed and (buffers := list(model.buffers())):
        # Like DDP, send all buffers of a dtype in one message (up to 256 MiB).
        dist._broadcast_coalesced(dist.distributed_c10d._get_default_group(), buffers, 2**28, 0)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(
    model: nn.Module, measure: LossAndMetrics, batches: Iterable[Any], distributed: bool
) -> dict[str, float]:
    """Return the mean loss and the metrics over all batches (collective if `distributed`)."""
    sums = measure.new_sums(distributed)
    with evaluating(model, measure.device, distributed):
        for batch in batches:
            sums.add(measure.count(batch), measure(model, batch))
    return all_means(sums, measure.device, distributed) | sums.compute(distributed)


def outputs_in_order(
    function: Callable[[Any], Any],
    model: nn.Module,
    measure: LossAndMetrics,
    loader: DataLoader[Any],
    distributed: bool,
) -> Any:
    """Apply `function` to all batches and gather the outputs on rank 0 (collective).

    Args:
        function: Takes a batch on the device, runs the model and returns one output per sample.
        model: The model, which is put into eval mode.
        measure: Where and in which precision to compute.
        loader: This rank's batches, from `eval_loader`.
        distributed: Whether there are other ranks.

    Returns:
        On rank 0 the outputs in data-set order, elsewhere None. Tensors are concatenated on the
        CPU (an empty tensor if there are no items). Other outputs become a list with one entry
        per item, which is pickled to reach rank 0.

    Raises:
        ValueError: If there is not one output per item, or, on all ranks, if some outputs are
            tensors and others are not, or their rows differ in shape or dtype.
        TypeError: If an output is neither a tensor, a tuple, a dict, a dataclass nor a list.
    """
    batches: list[Any] = []
    left = len(loader.sampler)  # type: ignore[arg-type]  # a ShardSampler has a length
    with evaluating(model, measure.device, distributed):
        for batch in loader:
            samples = min(left, loader.batch_size or 1)  # whatever a collate_fn makes of them
            left -= samples
            with measure.autocast():  # not around the loader: data sets may compute
                outputs = function(move(batch, measure.device))
            if isinstance(outputs, Tensor) and not outputs.dim():
                outputs = outputs.reshape(1)  # one item, squeezed
            if (rows := _rows(outputs, samples)) is None:
                raise TypeError(
                    "outputs must be tensors with one row per item, a tuple or dict of them, or a "
                    f"list, not {type(outputs).__name__}"
                )
            batches.append(rows)
    # A rank without items cannot tell which kind of output the other ranks have.
    own = {(r.shape[1:], r.dtype) if isinstance(r, Tensor) else "list" for r in batches}
    kinds = set().union(*exchange_objects(own)) if distributed else own
    if len(kinds) > 1:
        raise ValueError(
            f"outputs must have rows of one shape and dtype, or all be lists, not {kinds}: pad them"
        )
    rows = list(chain(*batches)) if kinds == {"list"} else torch.cat(batches or [torch.empty(0)])
    batches.clear()  # they were copied
    return gather_rows(rows, len(loader.dataset)) if distributed else rows  # type: ignore[arg-type]


def gather_rows(own: Any, items: int) -> Any:
    """Return the rows of all ranks, interleaved, on rank 0, and None elsewhere (collective).

    Args:
        own: This rank's rows, a tensor of shape (rows, ...) or a list. In the result they are the
            rows rank, rank + world_size, rank + 2 * world_size and so on. The ranks may differ
            by one row, and only a rank without rows may pass another shape or dtype than rank 0.
        items: The number of rows of all ranks together.

    Returns:
        All rows on rank 0: one tensor on the CPU, or a list.
    """
    if isinstance(own, list):
        whole: Any = [None] * items
        parts: Any = gather_objects(own) or []
    else:
        whole = own.new_empty(items, *own.shape[1:], device=CPU)
        specs = exchange_objects((own.shape, own.dtype))
        # One after the other, so that rank 0 holds only two ranks' rows beside the whole.
        rest = (move_tensor(own.contiguous(), spec, src) for src, spec in enumerate(specs) if src)
        parts = chain([None if dist.get_rank() else own], rest)
    for rank, part in enumerate(parts):
        if part is not None and len(part):
            whole[rank :: dist.get_world_size()] = part
    return None if dist.get_rank() else whole


def _rows(outputs: Any, samples: int) -> Any:
    """Return a batch's outputs on the CPU: a tensor with one row per sample, or a list.

    A list has one entry per sample. The parts of a tuple, a dict or a dataclass are split one by
    one: each entry is then a tuple or a dict with that sample's rows. The result is None if nothing
    has a batch dimension, as for a loss.
    """
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {part.name: getattr(outputs, part.name) for part in dataclasses.fields(outputs)}
    rows: Any = None
    if isinstance(outputs, Tensor):
        rows = outputs.to(CPU, copy=True) if outputs.dim() else None
    elif isinstance(outputs, list):
        rows = move(outputs, CPU)
    elif isinstance(outputs, Mapping | tuple):
        named = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs))
        parts = {n: part for n, o in named.items() if (part := _rows(o, samples)) is not None}
        rows = list(zip(*parts.values(), strict=True)) if parts else None
        if rows and isinstance(outputs, Mapping):
            rows = [dict(zip(parts, row, strict=True)) for row in rows]
    if rows is not None and len(rows) != samples:
        raise ValueError(
            f"{len(rows)} outputs for {samples} items: return one row per item, not a mean"
        )
    return rows
