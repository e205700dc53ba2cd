"""The exercise of chapter 08: a file that one rank prepares."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from lesson.partners import has_no_partner, open_impatient_group


class Preparation(NamedTuple):
    """When `first_on_rank_0` called `prepare` on a rank, by a clock that the ranks share."""

    calls: int
    began: float  # the first call
    ended: float


def observe_first_on_rank_0(first_on_rank_0: Callable[..., Any]) -> Preparation | None:
    open_impatient_group()
    calls: list[tuple[float, float]] = []

    def prepare() -> None:
        began = time.monotonic()
        # Rank 0's download takes longer than a reader's time.sleep(1) would wait.
        time.sleep(3 if dist.get_rank() == 0 else 0.5)
        calls.append((began, time.monotonic()))

    try:
        first_on_rank_0(prepare)
        dist.all_reduce(torch.zeros(1))  # meets a collective too many, or too few
    except RuntimeError as error:
        if not has_no_partner(error):
            raise
        return None
    began, ended = calls[0] if calls else (0.0, 0.0)
    return Preparation(len(calls), began, ended)


def judge_first_on_rank_0(seen: list[Preparation | None]) -> str | None:
    first, other = seen
    if first is None or other is None:
        return (
            "your function hangs: one rank calls a collective, such as dist.barrier(), that the "
            "other rank never calls. A barrier inside `if rank == 0:` waits forever, so put it "
            "where every rank passes it exactly once."
        )
    if not first.calls:
        return "rank 0 never called prepare(). Rank 0 is the rank that must call it first."
    if not other.calls:
        return (
            "rank 1 never called prepare(), so it has no data. The other ranks must call it too, "
            "once rank 0 has finished."
        )
    if other.ended <= first.began:
        return (
            "rank 1 did the work and rank 0 came after it. Swap the two: rank 0 prepares before "
            "the barrier, the other ranks after it."
        )
    if other.began < first.ended:
        return (
            "rank 1 called prepare() before rank 0 had finished, so both did the work at the same "
            "time. Something must hold rank 1 back until rank 0 is done: a barrier can."
        )
    if (first.calls, other.calls) != (1, 1):
        return (
            f"the order is right, but prepare() was called too often: {first.calls}x on rank 0, "
            f"{other.calls}x on rank 1. Call it once on each rank."
        )
    return None


EXERCISES = {"first_on_rank_0": Exercise(observe_first_on_rank_0, judge_first_on_rank_0)}
