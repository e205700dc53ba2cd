"""The exercise of chapter 12: a file that one rank prepares and all ranks read."""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from lesson.partners import has_no_partner, open_impatient_group


class Preparation(NamedTuple):
    """What `first_on_rank_0` did on a rank."""

    calls: int
    found_ready: bool  # at the first call
    stuck: bool


def observe_first_on_rank_0(first_on_rank_0: Callable[..., Any]) -> Preparation:
    open_impatient_group()
    shared = [tempfile.mkdtemp(prefix="ddp-exercise-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        atexit.register(shutil.rmtree, shared[0], ignore_errors=True)
    ready = Path(shared[0]) / "ready"
    found: list[bool] = []

    def prepare() -> None:
        found.append(ready.exists())
        if not found[-1]:
            time.sleep(3)  # a download: longer than a reader's time.sleep(1) would wait
            ready.with_name(f"part {os.getpid()}").touch()
            ready.with_name(f"part {os.getpid()}").replace(ready)

    stuck = False
    try:
        first_on_rank_0(prepare)
        dist.all_reduce(torch.zeros(1))  # what a job does next, whatever it is
    except RuntimeError as error:
        if not has_no_partner(error):
            raise
        stuck = True
    return Preparation(len(found), bool(found) and found[0], stuck)


def judge_first_on_rank_0(seen: list[Preparation]) -> str | None:
    if any(preparation.stuck for preparation in seen):
        return (
            "your function hangs: one rank calls a collective, such as dist.barrier(), that the "
            "other rank never calls. A barrier inside `if rank == 0:` waits forever, so put it "
            "where every rank passes it exactly once."
        )
    first, other = seen
    if not first.calls:
        return "rank 0 never called prepare(). Rank 0 is the rank that must call it first."
    if first.found_ready:
        return (
            "rank 1 did the work and rank 0 came after it. Swap the two: rank 0 prepares before "
            "the barrier, the other ranks after it."
        )
    if not other.calls:
        return (
            "rank 1 never called prepare(), so it has no data. The other ranks must call it too, "
            "once rank 0 has finished."
        )
    if not other.found_ready:
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
