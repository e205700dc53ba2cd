"""What each of DDP's own settings changes in a step.

Two ranks on the CPU train a model of 10 million weights (40 MB of gradients) with batches of 16, so
the all-reduce is most of the step. The model has 16 layers of 2.4 MiB. DDP's defaults put them into
3 buckets, and a `bucket_cap_mb` of 1, 5 and 100 into 16, 6 and 1. The second table has steps of
four batches: with one all-reduce per batch, and with one per step under `no_sync`. The benchmark
compares the final weights with the baseline's and fails if they differ. `no_sync` adds the same
numbers in another order, so there it allows rounding errors. The other settings must give the same
bits.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import AGAIN, compare, side_by_side, timed
from steps import check_equal
from tables import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import initialize_ddp, run_ranks

ROUNDS, RANKS, STEPS = 20, 2, 3
WIDTH, LAYERS, BATCH, ACCUMULATE = 800, 16, 16, 4
DEFAULT, EACH = "DDP's defaults (25 MiB)", "one all-reduce per batch"
ONCE = "one all-reduce per step (no_sync)"
KNOBS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    DEFAULT + AGAIN: {},
    "bucket_cap_mb=1": {"bucket_cap_mb": 1},
    "bucket_cap_mb=5": {"bucket_cap_mb": 5},
    "bucket_cap_mb=100": {"bucket_cap_mb": 100},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
}


def measure(rounds: int) -> list[Table]:
    knobs, accumulation = run_ranks(times_on_rank, rounds, nproc=RANKS)[0]
    return [
        Table("a step", compare(knobs, DEFAULT), []),
        Table(f"a step of {ACCUMULATE} batches", compare(accumulation, EACH), []),
    ]


def times_on_rank(rounds: int) -> list[dict[str, list[float]]]:
    rank = initialize_ddp().rank
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    batches = [torch.randn(BATCH, WIDTH) for _ in range(ACCUMULATE)]
    knobs = {name: DDP(make_model(), **options) for name, options in KNOBS.items()}
    one = {name: timed(stepping(model, batches[:1], 1), STEPS) for name, model in knobs.items()}
    first = side_by_side(one, rounds)
    check_equal(knobs, make_model())
    del one, knobs
    every = {EACH: 1, EACH + AGAIN: 1, ONCE: ACCUMULATE}
    models = {name: DDP(make_model()) for name in every}
    four = {name: timed(stepping(models[name], batches, n)) for name, n in every.items()}
    second = side_by_side(four, rounds)
    check_equal(models, make_model(), rtol=1e-4, atol=1e-6)  # the sums are in another order
    return [first, second]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def stepping(model: DDP, batches: list[torch.Tensor], every: int) -> Callable[[], None]:
    """Return an optimizer step on all `batches`, with an all-reduce after each `every` of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        for number, batch in enumerate(batches, start=1):
            with model.no_sync() if number % every else nullcontext():
                (F.mse_loss(model(batch), batch) / len(batches)).backward()
        optimizer.step()

    return step
