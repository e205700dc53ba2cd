"""The exercise of chapter 11: an epoch in which the ranks have different numbers of batches."""

from collections.abc import Callable, Iterator
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
    """What `train_epoch` did on a rank; `weight` is None where a collective found no partner."""

    weight: Tensor | None
    moved: float = 0.0  # by the weight, over the learning rate
    returned: object = None
    drawn: int = 0


class Counted:
    """Batches that count how many of them were drawn."""

    def __init__(self, number: int) -> None:
        self.number, self.drawn = number, 0

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.number):
            self.drawn += 1
            yield torch.full((8, 4), number + 1.0)


def observe_train_epoch(train_epoch: Callable[..., Any]) -> Epoch:
    torch.manual_seed(0)
    open_impatient_group()
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches, start = Counted(BATCHES[dist.get_rank()]), model.module.weight.detach().clone()
    try:
        returned = train_epoch(model, optimizer, batches)
        dist.barrier()  # what a job does next, whatever it is
    except RuntimeError as error:
        if not has_no_partner(error):
            raise
        return Epoch(None)
    weight = model.module.weight.detach()
    return Epoch(weight, ((start - weight) / RATE).mean().item(), returned, batches.drawn)


def judge_train_epoch(seen: list[Epoch]) -> str | None:
    weights = [epoch.weight for epoch in seen if epoch.weight is not None]
    if len(weights) < len(seen):
        return (
            "your function hangs: a rank that still has batches calls backward(), and the rank "
            "that has none left does not join its all-reduce. model.join() lets a finished rank "
            "take part."
        )
    drawn = [epoch.drawn for epoch in seen]
    if drawn != BATCHES:
        return (
            f"the ranks have {BATCHES} batches, but your function took {drawn} of them. No batch "
            "may be dropped: let the rank that finishes first join the others' all-reduces."
        )
    if not torch.equal(*weights):
        return (
            "every batch was used, but the ranks end with different weights. The gradients were "
            "not averaged: call model(batch), not model.module(batch), and leave out no_sync()."
        )
    moved = seen[0].moved
    if abs(moved - MOVED) > 0.1:
        return (
            f"the mean gradients of the five steps add up to {MOVED}, but your steps add up to "
            f"{moved:.1f}. The sum was divided by both ranks even where only one had a batch: "
            "one argument of model.join() changes the divisor."
        )
    returned = [epoch.returned for epoch in seen]
    if returned != BATCHES:
        return (
            f"the training is right, but the ranks trained on {BATCHES} batches and your function "
            f"returned {returned}. Return the number of batches of this rank."
        )
    return None


EXERCISES = {"train_epoch": Exercise(observe_train_epoch, judge_train_epoch)}
