"""Evaluate a model, each rank on its shard, and bring the outputs into data-set order."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..collectives import gather_objects, reduce_sum
from .batches import CPU, move
from .loss_and_metrics import LossAndMetrics
from .rank_sync import all_means
from .sharded_data import gather_rows

LEFT_OUT: Any = object()  # a part of the outputs without a batch dimension, such as a loss


@contextmanager
def evaluating(model: nn.Module, distributed: bool) -> Iterator[None]:
    """Put `model` into eval mode, without gradients and with rank 0's buffers (collective).

    BatchNorm's buffers differ between ranks, because each rank has seen its own samples.
    """
    if distributed:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
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
    with evaluating(model, distributed):
        for batch in batches:
            sums.add(measure.count(batch), measure(model, batch))
    return all_means(sums, measure.device, distributed) | sums.compute()


def outputs_in_order(
    function: Callable[[Any], Any], loader: DataLoader[Any], device: torch.device, distributed: bool
) -> Any:
    """Apply `function` to all batches and gather the outputs on rank 0 (collective).

    Args:
        function: Takes a batch on `device`, returns one output per sample.
        loader: This rank's batches, from `eval_loader`.
        device: Where `function` computes.
        distributed: Whether there are other ranks.

    Returns:
        On rank 0 the outputs in data-set order, elsewhere None. Tensors are concatenated on the
        CPU (an empty tensor if there are no items). Other outputs become a list with one entry
        per item, which is pickled to reach rank 0.

    Raises:
        ValueError: If there is not one output per item, or only some outputs are tensors.
        TypeError: If an output is neither a tensor, a tuple, a dict, a dataclass nor a list.
    """
    tensors: list[Tensor] = []
    entries: list[Any] = []
    left = len(loader.sampler)  # type: ignore[arg-type]  # a ShardSampler has a length
    for batch in loader:
        samples = min(left, loader.batch_size or 1)  # whatever a collate_fn makes of them
        left -= samples
        outputs = function(move(batch, device))
        if isinstance(outputs, Tensor):
            outputs = outputs if outputs.dim() else outputs.reshape(1)  # one item, squeezed
            _check_count(len(outputs), samples)
            tensors.append(outputs.cpu())
        else:
            entries += _entries(outputs, samples)
    # A rank without items cannot tell which kind of output the other ranks have.
    counts: dict[str, float] = {"tensors": len(tensors), "lists": len(entries)}
    if distributed:
        counts = reduce_sum(counts)
    if all(counts.values()):
        raise ValueError(
            "outputs are tensors for some batches and something else for others: return one kind"
        )
    if not distributed:
        return entries or (torch.cat(tensors) if tensors else torch.empty(0))
    if not counts["lists"]:
        return gather_rows(tensors)
    lists = gather_objects(entries)
    return None if lists is None else _interleave_lists(lists)


def _entries(outputs: Any, samples: int) -> list[Any]:
    """Split a batch's outputs into one entry per sample, on the CPU."""
    entries = _split(outputs, samples)
    if entries is LEFT_OUT:
        raise TypeError(
            "outputs must be tensors with one row per item, a tuple or dict of them, or a list, "
            f"not {type(outputs).__name__}"
        )
    return entries


def _split(outputs: Any, samples: int) -> Any:
    """Return one entry per sample, or LEFT_OUT for a part without a batch dimension.

    A list has one entry per sample already. The parts of a tuple, a dict or a dataclass are split
    one by one: each entry is then a tuple or a dict with that sample's rows.
    """
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {part.name: getattr(outputs, part.name) for part in dataclasses.fields(outputs)}
    if isinstance(outputs, Tensor) and outputs.dim():
        entries = list(outputs.cpu())
    elif isinstance(outputs, list):
        entries = move(outputs, CPU)
    elif isinstance(outputs, Mapping):
        parts = {name: _split(part, samples) for name, part in outputs.items()}
        parts = {name: part for name, part in parts.items() if part is not LEFT_OUT}
        entries = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
    elif isinstance(outputs, tuple):
        rows = [part for o in outputs if (part := _split(o, samples)) is not LEFT_OUT]
        entries = list(zip(*rows, strict=True))
    else:
        return LEFT_OUT
    if not entries and not isinstance(outputs, list):
        return LEFT_OUT  # no part has a batch dimension
    _check_count(len(entries), samples)
    return entries


def _check_count(outputs: int, samples: int) -> None:
    """Raise ValueError unless there is one output per sample."""
    if outputs != samples:
        raise ValueError(
            f"there must be one output per item, not {outputs} for {samples} items: "
            "return one row per item, not a mean over the batch"
        )


def _interleave_lists(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Return all ranks' items in data-set order: rank r has items r, r + world_size and so on."""
    nothing = object()
    rows = chain.from_iterable(zip_longest(*parts, fillvalue=nothing))
    return [item for item in rows if item is not nothing]
