"""The exercises of chapter 08: uneven shards, and a file that one rank prepares."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from lesson.partners import has_no_partner, open_impatient_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCHES = [3, 5]  # of each rank
RATE = 0.01
MOVED = 15.0  # batch n has the gradient n for each weight: the means of both ranks are 1 to 5


class Epoch(NamedTuple):
    """What `train_epoch` did on a rank."""

    trained: int  # how many batches went through the model
    returned: object
    weight: Tensor
    moved: float  # by the weight, over the learning rate


class Preparation(NamedTuple):
    """When `first_on_rank_0` called `prepare` on a rank, by a clock that the ranks share."""

    calls: int
    began: float  # the first call
    ended: float


def finishes(meet: Callable[[], Any], function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Call the reader's function, and then a collective that it should not contain.

    Returns:
        Whether each collective found its partner, and what the function returned.
    """
    try:
        returned = function(*args)
        meet()
    except RuntimeError as error:
        if not has_no_partner(error):
            raise
        return False, None
    return True, returned


def observe_train_epoch(train_epoch: Callable[..., Any]) -> Epoch | None:
    torch.manual_seed(0)
    open_impatient_group()
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = [torch.full((8, 4), n + 1.0) for n in range(BATCHES[dist.get_rank()])]
    trained: list[None] = []
    model.module.register_forward_hook(lambda *_: trained.append(None))
    start = model.module.weight.detach().clone()
    met, returned = finishes(dist.barrier, train_epoch, model, optimizer, batches)
    weight = model.module.weight.detach()
    moved = ((start - weight) / RATE).mean().item()
    return Epoch(len(trained), returned, weight, moved) if met else None


def judge_train_epoch(seen: list[Epoch | None]) -> str | None:
    epochs = [epoch for epoch in seen if epoch]
    if len(epochs) < len(seen):
        return (
            "your function hangs: a rank that still has batches calls backward(), and the rank "
            "that has none left does not join its all-reduce. model.join() lets a finished rank "
            "take part."
        )
    trained = [epoch.trained for epoch in epochs]
    if trained != BATCHES:
        return (
            f"the ranks have {BATCHES} batches, but your function trained on {trained}. No batch "
            "may be dropped: let the rank that finishes first join the others' all-reduces."
        )
    if not torch.equal(*(epoch.weight for epoch in epochs)):
        return (
            "every batch was used, but the ranks end with different weights. The gradients were "
            "not averaged: call model(batch), not model.module(batch), and leave out no_sync()."
        )
    moved = epochs[0].moved
    if abs(moved - MOVED) > 0.1:
        return (
            f"the mean gradients of the five steps add up to {MOVED}, but your steps add up to "
            f"{moved:.1f}. The sum was divided by both ranks even where only one had a batch: "
            "one argument of model.join() changes the divisor."
        )
    returned = [epoch.returned for epoch in epochs]
    if returned != BATCHES:
        return (
            f"the training is right, but the ranks trained on {BATCHES} batches and your function "
            f"returned {returned}. Return the number of batches of this rank."
        )
    return None


def observe_first_on_rank_0(first_on_rank_0: Callable[..., Any]) -> Preparation | None:
    open_impatient_group()
    calls: list[tuple[float, float]] = []

    def prepare() -> None:
        began = time.monotonic()
        # Rank 0's download takes longer than a reader's time.sleep(1) would wait.
        time.sleep(3 if dist.get_rank() == 0 else 0.5)
        calls.append((began, time.monotonic()))

    met, _ = finishes(lambda: dist.all_reduce(torch.zeros(1)), first_on_rank_0, prepare)
    began, ended = calls[0] if calls else (0.0, 0.0)
    return Preparation(len(calls), began, ended) if met else None


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


EXERCISES = {
    "train_epoch": Exercise(observe_train_epoch, judge_train_epoch),
    "first_on_rank_0": Exercise(observe_first_on_rank_0, judge_first_on_rank_0),
}
