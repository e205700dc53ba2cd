"""Evaluate a model on every rank's shard: in evaluation mode, the outputs in data-set order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .batches import inputs_of, move, samples_in
from .collectives import gather_objects, gather_rows, reduce_sum


@contextmanager
def evaluating(model: nn.Module, distributed: bool) -> Iterator[None]:
    """Set `model` to evaluation, without gradients and with rank 0's buffers (collective).

    BatchNorm's buffers differ by rank: each has seen its own samples.
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
    """Return the outputs of `function` of all ranks' shards on rank 0, else None (collective).

    `batches` are this rank's of a shard_loader. Tensors are joined to one on the CPU, empty where
    there is no item at all; other outputs are taken apart into a list, and travel pickled.
    """
    tensors: list[Tensor] = []
    entries: list[Any] = []
    for batch in batches:
        inputs = inputs_of(batch)
        samples = samples_in(inputs)
        outputs = function(move(inputs, device))
        if isinstance(outputs, Tensor):
            outputs = outputs if outputs.dim() else outputs.reshape(1)  # squeezed, of one item
            _check_count(len(outputs), samples)
            tensors.append(outputs.cpu())
        else:
            entries += _items(outputs, samples)
    # A rank without items cannot know which of the two the others have.
    counts: dict[str, float] = {"tensors": len(tensors), "lists": len(entries)}
    if distributed:
        counts = reduce_sum(counts, names=list(counts))
    if all(counts.values()):
        raise ValueError("outputs are tensors for some batches and not for others: return one kind")
    if not distributed:
        return entries or (torch.cat(tensors) if tensors else torch.empty(0))
    if not counts["lists"]:
        return gather_rows(tensors)
    lists = gather_objects(entries)
    return None if lists is None else _interleave_lists(lists)


def _items(outputs: Any, samples: int) -> list[Any]:
    """Return a model's outputs for a batch as one entry for each of its `samples`, on the CPU.

    A list holds them; a tuple or a dict has tensors with a sample a row, and so have the entries.
    Raises ValueError for another number of them, TypeError for anything else.
    """
    if isinstance(outputs, Tensor | list):
        found = list(outputs) if not isinstance(outputs, Tensor) or outputs.dim() else []
    elif isinstance(outputs, Mapping):
        rows = zip(*(_items(part, samples) for part in outputs.values()), strict=True)
        found = [dict(zip(outputs, row, strict=True)) for row in rows]
    elif isinstance(outputs, tuple):
        found = list(zip(*(_items(part, samples) for part in outputs), strict=True))
    else:
        kind = type(outputs).__name__
        raise TypeError(f"outputs must be tensors, a tuple or dict of them, or a list, not {kind}")
    _check_count(len(found), samples)
    return move(found, torch.device("cpu"))


def _check_count(found: int, samples: int) -> None:
    """Raise ValueError unless there is an output for each sample."""
    if found != samples:
        raise ValueError(
            f"there must be one output for each item, not {found} for {samples}: return a row an "
            "item, not a mean over the batch"
        )


def _interleave_lists(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the items of all ranks in order, rank r having items r, r + world_size and so on."""
    nothing = object()
    rows = chain.from_iterable(zip_longest(*parts, fillvalue=nothing))
    return [item for item in rows if item is not nothing]
