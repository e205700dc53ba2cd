"""The exercises of chapter 10: bytes per weight, and clipping a gradient that is sharded."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from torch import Tensor

PARTS = "a weight takes 4 bytes, its gradient 4 and Adam's state 8"
# Strategy, ranks, bytes per weight, and the hint for another answer.
BYTES = [
    ("DDP, bucket view", 2, 16, f"DDP shards nothing, so do not divide by the ranks: {PARTS}"),
    ("DDP, bucket view", 8, 16, "right for 2 ranks, but the number of ranks does not matter here"),
    ("DDP", 2, 20, "without the bucket view each gradient exists twice: in .grad and in a bucket"),
    ("ZeRO-1", 2, 12, f"{PARTS}. ZeRO-1 divides only the optimizer state by the ranks"),
    ("ZeRO-1", 8, 9, "it is right for 2 ranks only: divide by the argument, not by 2"),
    ("ZeRO-2", 4, 7, f"{PARTS}. ZeRO-2 divides all but the weights by the ranks"),
    ("FSDP2", 4, 4, f"{PARTS}. FSDP2 divides all three by the ranks"),
    ("FSDP2", 64, 0.25, "it is right for 4 ranks only: divide by the argument, not by 4"),
]


def _run_bytes(bytes_per_weight: Callable[[str, int], float]) -> list[Any]:
    return [bytes_per_weight(strategy, ranks) for strategy, ranks, *_ in BYTES]


def _judge_bytes(seen: list[list[Any]]) -> str | None:
    for answer, (strategy, ranks, right, hint) in zip(seen[0], BYTES, strict=True):
        if not isinstance(answer, int | float):
            return f"for {strategy!r} it returned {answer!r}, not a number"
        if abs(answer - right) > 1e-9:
            return f"for {strategy} on {ranks} ranks you count {answer:g} bytes: {hint}"
    return None


# Both ranks together hold one gradient of the length 13: rank 0's part has 5, and rank 1's 12.
SHARDS = [[[3.0, 0.0], [4.0]], [[12.0], []]]  # a rank may hold no row of a small parameter
LIMITS = (1.3, 26.0)  # the first is reached, the second is not
NOT_COPIES = "The shards are parts of one vector, not copies: all-reduce the sum of their squares"
WRONG_NORMS = {
    17.0: "it adds the ranks' norms, 5 + 12. The norm is the root of a sum of squares",
    8.5: f"it averages the ranks' norms. {NOT_COPIES}, and take the root after that",
    84.5**0.5: f"it averages the squares over the ranks. {NOT_COPIES}, and divide by nothing",
    169.0: "it returns the sum of the squares: take the root",
}


class Clipped(NamedTuple):
    """What a call returned, and the shards after it, in one vector."""

    norm: float
    shards: Tensor


def _run_clip(clip_shards: Callable[[list[Tensor], float], Any]) -> list[Clipped]:
    """Clip this rank's shards twice, each time from the start."""
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that makes no collective call could leave while the other connects
    found = []
    for limit in LIMITS:
        shards = [torch.tensor(values) for values in SHARDS[dist.get_rank()]]
        norm = clip_shards(shards, limit)
        found.append(Clipped(float(norm), torch.cat(shards)))
    dist.destroy_process_group()
    return found


def _judge_clip(seen: list[list[Clipped]]) -> str | None:
    norms = [rank[0].norm for rank in seen]
    if _near(norms[0], 5) and _near(norms[1], 12):
        return (
            "rank 0 measured the norm 5 and rank 1 the norm 12: each rank measured its own shards, "
            "so each scaled by another factor. all-reduce the sums of the squares first"
        )
    if not _near(norms[0], norms[1]):
        return f"the ranks return different norms, {norms[0]:g} and {norms[1]:g}"
    if not _near(norms[0], 13):
        hints = [hint for norm, hint in WRONG_NORMS.items() if _near(norms[0], norm)]
        hint = hints[0] if hints else "rank 0's shards have the norm 5, and rank 1's 12"
        return f"the norm over both ranks is 13, but you return {norms[0]:g}: {hint}"
    for values, (tight, loose) in zip(SHARDS, seen, strict=True):
        start = torch.cat([torch.tensor(part) for part in values])
        if torch.equal(tight.shards, start):
            return (
                "the norm is right, but the shards still have their old values: scale them in "
                "place, for example with mul_"
            )
        if not torch.allclose(loose.shards, start):
            return (
                "the norm 13 is below the limit 26, and the gradient was scaled all the same. "
                "Clipping only makes a gradient shorter: the factor is at most 1"
            )
        if not torch.allclose(tight.shards, start / 10, rtol=1e-4):
            return "with the norm 13 and the limit 1.3, scale the shards on every rank by 0.1"
    return None


def _near(value: float, other: float) -> bool:
    return abs(value - other) < 1e-3


EXERCISES = {
    "bytes_per_weight": Exercise(_run_bytes, _judge_bytes, nproc=0),
    "clip_shards": Exercise(_run_clip, _judge_clip),
}
