"""What a second process gains.

Weak scaling keeps the batch size per process, so the ideal ratio is 1. Strong scaling divides one
batch between them, so the ideal is 0.5. Two independent processes show what the machine allows.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side import AGAIN, compare, side_by_side, timed, together
from tables import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import initialize_ddp, run_ranks

ROUNDS, RANKS, STEPS = 30, 2, 20
BATCH, FEATURES, WIDTH = 256, 64, 512
ONE = f"one process, a batch of {BATCH}"


def measure(rounds: int) -> list[Table]:
    return [
        scaling("a step, weak scaling", BATCH, rounds),
        scaling("a step, strong scaling", BATCH // RANKS, rounds),
    ]


def scaling(title: str, batch: int, rounds: int) -> Table:
    times = run_ranks(times_on_rank, batch, rounds, nproc=RANKS)[0]
    return Table(title, compare(times, ONE), [])


def times_on_rank(batch: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step of rank 0, by variant and round."""
    initialize_ddp()
    torch.set_num_threads(1)
    independent, ddp = stepping(make_model(), batch), stepping(DDP(make_model()), batch)
    variants = {name: on_rank_0(stepping(make_model(), BATCH)) for name in (ONE, ONE + AGAIN)}
    if batch != BATCH:
        variants[f"one process, a batch of {batch}"] = on_rank_0(stepping(make_model(), batch))
    variants |= {
        f"two independent processes, {batch} each": on_all(independent),
        f"two processes with DDP, {batch} each": on_all(ddp),
    }
    return side_by_side(variants, rounds)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )


def stepping(model: nn.Module, batch: int) -> Callable[[], float]:
    """Return a function that times a training step on a batch of that many samples."""
    inputs, targets = torch.randn(batch, FEATURES), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return timed(step, STEPS)


def on_rank_0(variant: Callable[[], float]) -> Callable[[], float]:
    """Return a function that calls `variant` on rank 0 while the other rank waits."""

    def alone() -> float:
        seconds = variant() if dist.get_rank() == 0 else 0.0
        dist.barrier()
        return seconds

    return alone


def on_all(variant: Callable[[], float]) -> Callable[[], float]:
    """Return a function that calls `variant` on all ranks at once and returns their mean time."""
    begun = together(variant)

    def mean() -> float:
        seconds = torch.tensor(begun(), dtype=torch.float64)
        dist.all_reduce(seconds)
        return seconds.item() / RANKS

    return mean
