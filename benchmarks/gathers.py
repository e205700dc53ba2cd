"""Bring the outputs of all ranks to rank 0, in the order of the data set.

Each of two ranks has 32 MiB of outputs, and the baseline is an all-reduce of 64 MiB. `Handler` is
the gather inside `predict`. The others bring the outputs to all ranks. The benchmark fails unless
all give the same outputs, apart from their order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import AGAIN, Times, compare, side_by_side, together
from tables import Table, goal
from torch import Tensor

from ddp_ref import initialize_ddp, run_ranks
from ddp_ref.model import gather_rows

PACKAGES = ["accelerate"]
ROUNDS, RANKS = 30, 2
BATCHES, ROWS, COLUMNS = 16, 2048, 256  # of a rank; a batch is 2 MiB
NUMBERS = RANKS * BATCHES * ROWS * COLUMNS
REDUCE, OURS = "bare all-reduce", "Handler"


def measure(rounds: int) -> list[Table]:
    rows = compare(run_ranks(times_on_rank, rounds, nproc=RANKS)[0])
    ours = next(row for row in rows if row.name == OURS)
    target = "at most twice the time of the all-reduce"
    reached = goal(target, f"{ours.ratio:.2f} times", ours.at_most(2))
    return [Table("the gather of predict", rows, [reached])]


def times_on_rank(rounds: int) -> Times:
    from accelerate import Accelerator

    info, accelerator = initialize_ddp(), Accelerator(cpu=True)
    torch.set_num_threads(1)
    every = torch.arange(NUMBERS, dtype=torch.float32).view(-1, COLUMNS)  # (items, columns)
    parts = list(every[info.rank :: RANKS].contiguous().split(ROWS))

    def ours() -> Any:
        return gather_rows(torch.cat(parts), len(every))

    def by_accelerate() -> Tensor:
        return torch.cat([accelerator.gather_for_metrics(part) for part in parts])

    def as_objects() -> Tensor:
        ranks: list[Tensor] = [torch.empty(0)] * RANKS
        dist.all_gather_object(ranks, torch.cat(parts))
        return torch.stack(ranks, 1).flatten(0, 1)

    outputs = ours()
    assert outputs is None if info.rank else torch.equal(outputs, every)
    assert torch.equal(as_objects(), every)
    assert torch.equal(by_accelerate().sort(0).values, every)  # in an order of its own
    variants: dict[str, Callable[[], object]] = {
        REDUCE: partial(dist.all_reduce, torch.zeros(NUMBERS)),
        REDUCE + AGAIN: partial(dist.all_reduce, torch.zeros(NUMBERS)),
        OURS: ours,
        "accelerate's gather_for_metrics": by_accelerate,
        "all_gather_object": as_objects,
    }
    return side_by_side({name: together(work) for name, work in variants.items()}, rounds)
