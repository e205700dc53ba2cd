"""Bring the outputs of all ranks to rank 0 in data-set order, and evaluate each item once.

Two ranks run on the CPU. In the gather, each rank has 32 MiB of float32 outputs, in batches of 2
MiB. The baseline is an all-reduce of a tensor of 64 MiB, and GB/s counts these 64 MiB in every row.
`Handler` is the gather inside `predict`, without the model and the copy that `predict` makes of
each batch: it brings the outputs to rank 0 only, in order. The other functions bring them to all
ranks. accelerate's function gathers each batch separately, and returns the outputs in a different
order.

The evaluation runs a small model over 20,001 items, which two ranks cannot share evenly. Its
baseline is a hand-written loop over each rank's own items, with one all-reduce at the end. The
gathers of accelerate and `all_gather_object` bring all outputs and targets to both ranks, which
then compute the loss of all items. The benchmark fails unless all variants give the same outputs,
apart from their order, and the same loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side import AGAIN, compare, find, side_by_side, timed, together
from tables import Table, goal
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from ddp_ref import Handler, initialize_ddp, run_ranks
from ddp_ref.training.evaluation import gather_rows

ROUNDS, RANKS = 30, 2
BATCHES, ROWS, COLUMNS = 16, 2048, 256  # of a rank; a batch is 2 MiB
BYTES = RANKS * BATCHES * ROWS * COLUMNS * 4
ITEMS, BATCH, FEATURES, CLASSES = 20_001, 256, 64, 10
REDUCE, OURS, BY_HAND = "bare all-reduce", "Handler", "by hand, one all-reduce"


def measure(rounds: int) -> list[Table]:
    gather = compare(run_ranks(gather_times, rounds, nproc=RANKS)[0], REDUCE)
    evaluation = compare(run_ranks(evaluation_times, rounds, nproc=RANKS)[0], BY_HAND)
    ours = find(gather, OURS)
    target = "at most twice the time of the all-reduce"
    reached = goal(target, f"{ours.ratio:.2f} times", ours.at_most(2))
    return [
        Table("the gather of predict", gather, [reached], nbytes=BYTES),
        Table("a call of validate", evaluation, []),
    ]


def gather_times(rounds: int) -> dict[str, list[float]]:
    from accelerate import Accelerator

    info, accelerator = initialize_ddp(), Accelerator(cpu=True)
    torch.set_num_threads(1)
    every = torch.arange(RANKS * BATCHES * ROWS * COLUMNS, dtype=torch.float32)
    every = every.view(-1, COLUMNS)  # (items, columns)
    parts = list(every[info.rank :: RANKS].contiguous().split(ROWS))

    def reduce() -> Callable[[], float]:
        """Return the baseline with a tensor of its own."""
        return together(timed(partial(dist.all_reduce, torch.zeros(BYTES // 4))))

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
    variants = {
        REDUCE: reduce(),
        REDUCE + AGAIN: reduce(),
        OURS: together(timed(ours)),
        "accelerate's gather_for_metrics": together(timed(by_accelerate)),
        "all_gather_object": together(timed(as_objects)),
    }
    return side_by_side(variants, rounds)


def evaluation_times(rounds: int) -> dict[str, list[float]]:
    from accelerate import Accelerator

    info, accelerator = initialize_ddp(), Accelerator(cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(ITEMS, FEATURES)
    data = TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES)).eval()
    handler = Handler(
        model,
        torch.optim.SGD(model.parameters()),
        F.cross_entropy,
        metrics={"accuracy": accuracy},
    )
    handler.set_val_loader(data, BATCH)
    own = Subset(data, range(info.rank, ITEMS, RANKS))
    sharded = accelerator.prepare(DataLoader(data, BATCH))

    def ours() -> tuple[float, float]:
        metrics = handler.validate()
        return metrics["loss"], metrics["accuracy"]

    variants: dict[str, Callable[[], tuple[float, float]]] = {
        BY_HAND: partial(by_hand, model, DataLoader(own, BATCH)),
        BY_HAND + AGAIN: partial(by_hand, model, DataLoader(own, BATCH)),
        OURS: ours,
        "accelerate's gather_for_metrics": partial(
            by_gather, model, sharded, accelerator.gather_for_metrics
        ),
        "all_gather_object": partial(by_objects, model, DataLoader(own, BATCH)),
    }
    results = {name: torch.tensor(evaluate()) for name, evaluate in variants.items()}
    for name, result in results.items():
        torch.testing.assert_close(result, results[BY_HAND], msg=name)
    return side_by_side({n: together(timed(v)) for n, v in variants.items()}, rounds)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def means(outputs: Tensor, targets: Tensor) -> tuple[float, float]:
    return F.cross_entropy(outputs, targets).item(), accuracy(outputs, targets).item()


@torch.no_grad()
def by_hand(model: nn.Module, own: DataLoader) -> tuple[float, float]:
    sums = torch.zeros(3, dtype=torch.float64)  # of losses, of right ones, of items
    for inputs, targets in own:
        outputs = model(inputs)
        sums[0] += F.cross_entropy(outputs, targets, reduction="sum")
        sums[1] += (outputs.argmax(1) == targets).sum()
        sums[2] += len(targets)
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


@torch.no_grad()
def by_gather(
    model: nn.Module, batches: DataLoader, gather: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    gathered = [gather((model(inputs), targets)) for inputs, targets in batches]
    outputs, targets = map(torch.cat, zip(*gathered, strict=True))
    assert len(targets) == ITEMS
    return means(outputs, targets)


@torch.no_grad()
def by_objects(model: nn.Module, own: DataLoader) -> tuple[float, float]:
    local = [(model(inputs), targets) for inputs, targets in own]
    parts: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * RANKS
    dist.all_gather_object(parts, tuple(map(torch.cat, zip(*local, strict=True))))
    outputs, targets = map(torch.cat, zip(*parts, strict=True))
    assert len(targets) == ITEMS
    return means(outputs, targets)
