"""The exercise of chapter 10: bytes per weight."""

from collections.abc import Callable
from typing import Any

from lesson import Exercise

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


EXERCISES = {"bytes_per_weight": Exercise(_run_bytes, _judge_bytes, nproc=0)}
