"""Evaluate a model, each rank on its shard, and bring the outputs into data-set order."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..collectives import exchange_objects, gather_objects, move_tensor, reduce_sum
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
            if (rows := _split(outputs, samples)) is None:
                raise TypeError(
                    "outputs must be tensors with one row per item, a tuple or dict of them, or a "
                    f"list, not {type(outputs).__name__}"
                )
            entries += rows
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
    if (lists := gather_objects(entries)) is None:
        return None
    whole: list[Any] = [None] * sum(map(len, lists))
    for rank, part in enumerate(lists):  # rank r has the items r, r + world_size and so on
        whole[rank :: len(lists)] = part
    return whole


def _split(outputs: Any, samples: int) -> list[Any] | None:
    """Return one entry per sample on the CPU; None without a batch dimension, as for a loss.

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
        parts = {n: rows for n, p in outputs.items() if (rows := _split(p, samples)) is not None}
        entries = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
    elif isinstance(outputs, tuple):
        rows = [part for output in outputs if (part := _split(output, samples)) is not None]
        entries = list(zip(*rows, strict=True))
    else:
        return None
    if not entries and not isinstance(outputs, list):
        return None  # no part has a batch dimension
    _check_count(len(entries), samples)
    return entries


def _check_count(outputs: int, samples: int) -> None:
    """Raise ValueError unless there is one output per sample."""
    if outputs != samples:
        raise ValueError(
            f"there must be one output per item, not {outputs} for {samples} items: "
            "return one row per item, not a mean over the batch"
        )


def gather_rows(pieces: Sequence[Tensor]) -> Tensor | None:
    """Return the rows of all ranks, interleaved, on rank 0, and None elsewhere (collective).

    Rank 0 receives one rank's rows after another's.

    Args:
        pieces: This rank's rows in order, in tensors of shape (rows, ...) on the CPU. In the
            result they are the rows rank, rank + world_size, rank + 2 * world_size and so on.

    Returns:
        One tensor of shape (all rows, ...) on rank 0.

    Raises:
        ValueError: If rows differ in shape or dtype; on all ranks alike.
    """
    own = [piece.detach().resolve_conj().resolve_neg() for piece in pieces]
    passed = {(piece.shape[1:], piece.dtype) for piece in own}
    every = exchange_objects((passed, sum(map(len, own))))
    kinds = {kind for kinds, _ in every for kind in kinds}
    if len(kinds) > 1:
        raise ValueError(f"rows must have one shape and dtype, not {kinds}: pad or convert them")
    shape, dtype = kinds.pop() if kinds else ((), torch.get_default_dtype())
    rows = torch.cat(own).contiguous() if own else None
    is_first = len(every) == 1 or dist.get_rank() == 0
    whole = torch.empty(sum(n for _, n in every), *shape, dtype=dtype) if is_first else None
    for src, (_, number) in enumerate(every):
        part = move_tensor(rows, ((number, *shape), dtype) if number else None, src)
        if whole is not None and part is not None:
            whole[src :: len(every)] = part
    return whole
