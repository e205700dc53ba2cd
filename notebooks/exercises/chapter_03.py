"""Data, batch size and metrics: a loss over unequal shards."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson import Exercise
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import initialize_ddp

# By case, and by rank: how many of 12 targets count; -100 stands for the others.
COUNTED = (12, 3), (12, 0)
Seen = list[tuple[float, Tensor] | None]  # by case: loss and gradient, None where was no loss


def _shard(rank: int, counted: int) -> tuple[Tensor, Tensor]:
    """Return the inputs (12, 4) and targets (12,) of a rank."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(12, 4, generator=generator)
    targets = torch.randint(0, 3, (12,), generator=generator)
    targets[counted:] = -100
    return inputs, targets


def _model() -> nn.Linear:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return model


def _observe(global_mean_loss: Callable[..., Any]) -> Seen:
    rank = initialize_ddp().rank
    return [_step(global_mean_loss, *_shard(rank, counted[rank])) for counted in COUNTED]


def _step(
    global_mean_loss: Callable[..., Any], inputs: Tensor, targets: Tensor
) -> tuple[float, Tensor] | None:
    model = DDP(_model())
    loss = global_mean_loss(model(inputs), targets)
    fits = torch.tensor(int(isinstance(loss, Tensor) and loss.requires_grad))
    dist.all_reduce(fits, dist.ReduceOp.MIN)  # backward on one rank alone would wait for ever
    if not fits:
        return None
    loss.backward()
    return loss.item(), model.module.weight.grad


def _judge(seen: list[Seen]) -> str | None:
    one, other = seen[0]  # of rank 0: DDP gives all ranks the same gradient
    if one is None or other is None:
        return "what came back is no loss that backward can start from"
    first, second = one[1], other[1]
    whole, *wrong = _gradients_of_sums(COUNTED[0])
    hints = [
        "each rank's mean weighs alike, however many targets it is made of",
        "the gradient is half of what it should be",
        "the gradient is that of a sum, not of a mean",
        "half the gradient of a sum, where that of a mean should be",
        "targets of -100 were counted",
    ]
    for gradient, hint in zip(wrong, hints, strict=True):
        if torch.allclose(first, gradient, atol=1e-6):
            return hint
    if not torch.allclose(first, whole, atol=1e-6):
        return "the gradient is not that of the mean over all ranks' targets"
    if any(math.isnan(loss) for loss, _ in (rank[1] for rank in seen if rank[1])):
        return "right, until no target of a rank counts: then its loss is NaN"
    whole, *_ = _gradients_of_sums(COUNTED[1])
    if not torch.allclose(second, whole, atol=1e-6):
        return "right, until no target of a rank counts: then the gradient is another one"
    return None


def _gradients_of_sums(counted: tuple[int, int]) -> list[Tensor]:
    """Return the gradient of the mean over all targets, and those of typical mistakes."""
    sums = []
    for rank, count in enumerate(counted):
        inputs, targets = _shard(rank, count)
        model = _model()
        total = F.cross_entropy(model(inputs), targets, reduction="sum")
        sums.append(torch.autograd.grad(total, model.weight)[0])
    total, count = sums[0] + sums[1], sum(counted)
    of_means = (sums[0] / counted[0] + sums[1] / counted[1]) / 2
    return [total / count, of_means, total / (2 * count), total, total / 2, total / 24]


EXERCISES = {"global_mean_loss": Exercise(_observe, _judge)}
