"""Data that the ranks share out: check that all have the same, and bring rows back in order."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import exchange_objects, move_tensor

MESSAGE = 2**20  # bytes; above this size, bandwidth dominates a message's latency


def check_same(device: torch.device, **numbers: int) -> None:
    """Raise ValueError, on all ranks, unless all ranks pass the same `numbers` (collective).

    `device` is a device that the default group works on.
    """
    own = torch.tensor(list(numbers.values()), device=device)
    bounds = torch.stack([own, -own])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    most, least = bounds.tolist()
    for (what, number), high, low in zip(numbers.items(), most, least, strict=True):
        if high != -low:
            raise ValueError(
                f"all ranks must have the same data, this one has {number} {what}, they have "
                f"{-low} to {high}: seed what draws it, wait for what writes it"
            )


def gather_rows(pieces: Sequence[Tensor]) -> Tensor | None:
    """Return the rows of all ranks, interleaved, on rank 0, and None elsewhere (collective).

    The rows travel in messages of about a mebibyte, so rank 0 needs little memory beyond the
    result.

    Args:
        pieces: This rank's rows in order, in tensors of shape (rows, ...) on the CPU. In the
            result they are the rows rank, rank + world_size, rank + 2 * world_size and so on.

    Returns:
        One tensor of shape (all rows, ...) on rank 0.

    Raises:
        ValueError: If rows differ in shape or dtype; on all ranks alike.
    """
    groups = _grouped([piece.detach().resolve_conj().resolve_neg() for piece in pieces])
    own = {(piece.shape[1:], piece.dtype) for piece in pieces}
    every = exchange_objects((own, [sum(map(len, group)) for group in groups]))
    kinds = {kind for passed, _ in every for kind in passed}
    if len(kinds) > 1:
        raise ValueError(f"rows must have one shape and dtype, not {kinds}: pad or convert them")
    messages = (torch.cat(group) if len(group) > 1 else group[0] for group in groups)
    me = dist.get_rank() if len(every) > 1 else 0
    if me > 0:
        for message in messages:
            move_tensor(message.contiguous(), (message.shape, message.dtype), me)
        return None
    shape, dtype = kinds.pop() if kinds else ((), torch.get_default_dtype())
    return _interleave(messages, [counts for _, counts in every], shape, dtype)


def _interleave(
    own: Iterable[Tensor], counts: list[list[int]], shape: Any, dtype: torch.dtype
) -> Tensor:
    """Return all rows in order: rank 0's `own`, and of each rank messages of so many rows."""
    whole = torch.empty(sum(map(sum, counts)), *shape, dtype=dtype)
    for src, lengths in enumerate(counts):
        left = whole[src :: len(counts)]
        received = (move_tensor(None, ((rows, *shape), dtype), src) for rows in lengths)
        for part in received if src > 0 else own:
            assert part is not None
            left[: len(part)] = part
            left = left[len(part) :]
    return whole


def _grouped(pieces: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return `pieces` in groups of at least MESSAGE bytes; the last group has the rest."""
    groups: list[list[Tensor]] = []
    nbytes = MESSAGE
    for piece in pieces:
        if nbytes >= MESSAGE:
            groups.append([])
            nbytes = 0
        groups[-1].append(piece)
        nbytes += piece.nbytes
    return groups
