"""Evaluate a model, each rank on its shard, and bring the outputs into data-set order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import gather_objects, reduce_sum
from .batches import inputs_of, move, samples_in
from .sharded_data import gather_rows


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


def outputs_in_order(
    function: Callable[[Any], Any],
    batches: Iterable[Any],
    device: torch.device,
    distributed: bool,
) -> Any:
    """Apply `function` to all batches and gather the outputs on rank 0 (collective).

    Args:
        function: Takes a batch's inputs on `device`, returns one output per sample.
        batches: This rank's batches, from `shard_loader`.
        device: Where `function` computes.
        distributed: Whether there are other ranks.

    Returns:
        On rank 0 the outputs in data-set order, elsewhere None. Tensors are concatenated on the
        CPU (an empty tensor if there are no items). Other outputs become a list with one entry
        per item, which is pickled to reach rank 0.

    Raises:
        ValueError: If there is not one output per item, or only some outputs are tensors.
        TypeError: If an output is neither a tensor, a tuple, a dict nor a list.
    """
    tensors: list[Tensor] = []
    entries: list[Any] = []
    for batch in batches:
        inputs = inputs_of(batch)
        samples = samples_in(inputs)
        outputs = function(move(inputs, device))
        if isinstance(outputs, Tensor):
            outputs = outputs if outputs.dim() else outputs.reshape(1)  # one item, squeezed
            _check_count(len(outputs), samples)
            tensors.append(outputs.cpu())
        else:
            entries += _items(outputs, samples)
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


def _items(outputs: Any, samples: int) -> list[Any]:
    """Split a batch's outputs into one entry per sample, on the CPU.

    A list has one entry per sample already. A tuple or a dict has tensors with one row per sample:
    each entry is then a tuple or a dict with that sample's rows.
    """
    if isinstance(outputs, Tensor | list):
        entries = list(outputs) if not isinstance(outputs, Tensor) or outputs.dim() else []
    elif isinstance(outputs, Mapping):
        rows = zip(*(_items(part, samples) for part in outputs.values()), strict=True)
        entries = [dict(zip(outputs, row, strict=True)) for row in rows]
    elif isinstance(outputs, tuple):
        entries = list(zip(*(_items(part, samples) for part in outputs), strict=True))
    else:
        kind = type(outputs).__name__
        raise TypeError(f"outputs must be tensors, a tuple or dict of them, or a list, not {kind}")
    _check_count(len(entries), samples)
    return move(entries, torch.device("cpu"))


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
