"""Data that the ranks share out: check that all have the same, and bring rows back in order."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import exchange_objects, move_tensor


def check_same(device: torch.device, **numbers: int | None) -> None:
    """Raise ValueError, on all ranks, unless all ranks pass the same `numbers` (collective).

    `device` is a device that the default group works on.
    """
    own = torch.tensor([-1 if n is None else n for n in numbers.values()], device=device)
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
