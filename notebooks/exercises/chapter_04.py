"""Chapter 04: a loss over unequal shards."""

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

# For each case and rank: how many of 12 targets count. The others are -100.
COUNTED = (12, 3, 6), (12, 0, 6)
Seen = list[tuple[float, Tensor] | None]  # for each case: loss and gradient, or None without a loss


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
    dist.all_reduce(fits, dist.ReduceOp.MIN)  # backward() on one rank alone would wait forever
    if not fits:
        return None
    loss.backward()
    return loss.item(), model.module.weight.grad


def _judge(seen: list[Seen]) -> str | None:
    one, other = seen[0]  # of rank 0: DDP gives all ranks the same gradient
    if one is None or other is None:
        return (
            "your function must return a loss that backward() can start from: a tensor that still "
            "has its graph, not a number."
        )
    first, second = one[1], other[1]
    whole, *wrong = _gradients_of_sums(COUNTED[0])
    hints = [
        "in your result, each rank's mean has the same weight, although the ranks have different "
        "numbers of targets. Divide the sum of each rank's losses by the number of targets on all "
        "ranks.",
        "the gradient is a third of what it should be. DDP divides by the world size, so your loss "
        "has to be multiplied by it first.",
        "you got the gradient of the sum over all targets, not of their mean. What is still "
        "missing is a division by the number of targets on all ranks.",
        "you got a third of the gradient of the sum. DDP has divided by the world size, but "
        "nothing has divided by the number of targets on all ranks.",
        "targets of -100 were counted. Count only the other targets.",
        "the gradient is two thirds of what it should be. There are 3 ranks here, so ask "
        "torch.distributed for the world size.",
    ]
    for gradient, hint in zip(wrong, hints, strict=True):
        if torch.allclose(first, gradient, atol=1e-6):
            return hint
    if not torch.allclose(first, whole, atol=1e-6):
        return "the gradient is not the gradient of the mean over the targets of all ranks."
    if any(math.isnan(loss) for loss, _ in (rank[1] for rank in seen if rank[1])):
        return (
            "your loss is right, except on a rank where no target counts. The mean of such a rank "
            "is 0 / 0, so its loss is NaN."
        )
    whole, *_ = _gradients_of_sums(COUNTED[1])
    if not torch.allclose(second, whole, atol=1e-6):
        return (
            "your loss is right, except if no target of some rank counts. DDP still divides by the "
            "number of all ranks, including that rank."
        )
    return None


def _gradients_of_sums(counted: tuple[int, ...]) -> list[Tensor]:
    """Return the gradient of the mean over all targets, and those of typical mistakes."""
    sums = []
    for rank, count in enumerate(counted):
        inputs, targets = _shard(rank, count)
        model = _model()
        total = F.cross_entropy(model(inputs), targets, reduction="sum")
        sums.append(torch.autograd.grad(total, model.weight)[0])
    total, count, ranks = torch.stack(sums).sum(0), sum(counted), len(counted)
    means = [part / n for part, n in zip(sums, counted, strict=True) if n]
    of_means = torch.stack(means).sum(0) / ranks
    mean = total / count
    return [mean, of_means, mean / ranks, total, total / ranks, total / (12 * ranks), mean * 2 / 3]


EXERCISES = {"global_mean_loss": Exercise(_observe, _judge, nproc=3)}
