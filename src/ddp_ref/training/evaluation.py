"""Evaluate a model, each rank on its shard, and bring the outputs into data-set order."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..collectives import exchange_objects, gather_objects, move_tensor
from .data import items_of_batches
from .loss_and_metrics import LossAndMetrics
from .model import CPU, evaluating, move


def evaluate(
    model: nn.Module, task: LossAndMetrics, batches: Iterable[Any], distributed: bool
) -> dict[str, float]:
    """Return the mean loss and the metrics over all batches (collective if `distributed`)."""
    sums = task.new_sums(distributed)
    with evaluating(model, task.device) as inner:
        for batch, items in zip(batches, items_of_batches(batches), strict=False):
            count = task.count(batch, items)  # before `forward`, which may change the batch
            with task.autocast:
                outputs, targets = task.forward(inner, batch)
                sums.add(count, task.loss_fn(outputs, targets), outputs, targets)
            sums.commit()
    return sums.means() | sums.compute()


def outputs_in_order(
    function: Callable[[nn.Module, Any], Any],
    model: nn.Module,
    task: LossAndMetrics,
    loader: DataLoader[Any],
    distributed: bool,
) -> Any:
    """Apply `function` to all batches and gather the outputs on rank 0 (collective).

    Args:
        function: Runs the model on a batch, which is on the device; returns one output per item.
        model: The model, perhaps in DDP. `function` gets the one inside, in eval mode.
        task: Where and in which precision to compute.
        loader: This rank's batches, from `eval_loader`.
        distributed: Whether there are other ranks.

    Returns:
        On rank 0 the outputs in data-set order, elsewhere None. Tensors are concatenated on the
        CPU (an empty tensor if there are no items). Other outputs become a list with one entry
        per item, which is pickled to reach rank 0.

    Raises:
        ValueError: If there is not one output per item, or, on all ranks, if some outputs are
            tensors and others are not, or their rows differ in shape or dtype.
        TypeError: If an output is neither a tensor nor a list, nor a tuple or dict of them.
    """
    batches: list[Any] = []
    with evaluating(model, task.device) as inner:
        for batch, items in zip(loader, items_of_batches(loader), strict=False):
            with task.autocast:
                batches.append(_rows(function(inner, move(batch, task.device)), items))
    # A rank without items cannot tell which kind of output the other ranks have.
    own = {(r.shape[1:], r.dtype) if isinstance(r, Tensor) else "list" for r in batches}
    kinds = set().union(*exchange_objects(own)) if distributed else own
    if len(kinds) > 1:
        raise ValueError(
            f"outputs must have rows of one shape and dtype, or all be lists, not {kinds}: pad or "
            "convert them"
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


def _rows(outputs: Any, items: int | None) -> Any:
    """Return a batch's outputs on the CPU: a tensor with one row per item, or a list.

    The parts of a tuple or a dict are split one by one: each entry of the list is then a tuple or
    a dict with that item's rows. A part without a batch dimension, such as a loss, is left out.
    """
    if isinstance(outputs, Tensor | list):
        if isinstance(outputs, Tensor):  # a single item may have been squeezed
            outputs = outputs.to(CPU, copy=True) if outputs.dim() else outputs.reshape(1)
        rows = move(outputs, CPU)
        if len(rows) != items:
            raise ValueError(
                f"{len(rows)} outputs for {items} items: return one row per item, not a mean"
            )
        return rows
    named = dict(enumerate(outputs)) if isinstance(outputs, tuple) else outputs
    named = named if isinstance(named, Mapping) else {}
    rowed = [
        n for n, o in named.items() if isinstance(o, list) or (isinstance(o, Tensor) and o.dim())
    ]
    parts = {name: _rows(named[name], items) for name in rowed}
    if not parts:
        raise TypeError(
            "outputs must be tensors with one row per item, a list, or a tuple or dict of them, "
            f"not {type(outputs).__name__}"
        )
    rows = list(zip(*parts.values(), strict=True))
    return rows if isinstance(outputs, tuple) else [dict(zip(parts, r, strict=True)) for r in rows]
