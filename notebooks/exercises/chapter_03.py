"""Data, batch size and metrics: a loss over unequal shards."""

import torch
import torch.nn.functional as F
from lesson import Exercise
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import initialize_ddp

COUNTED = (12, 3)  # targets that count, of 12 on each rank; -100 stands for the others


def _shard(rank: int) -> tuple[Tensor, Tensor]:
    """Return the inputs (12, 4) and targets (12,) of a rank."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(12, 4, generator=generator)
    targets = torch.randint(0, 3, (12,), generator=generator)
    targets[COUNTED[rank] :] = -100
    return inputs, targets


def _model() -> nn.Linear:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return model


def _gradient_in_ddp(global_mean_loss):
    rank = initialize_ddp().rank
    inputs, targets = _shard(rank)
    model = DDP(_model())
    loss = global_mean_loss(model(inputs), targets)
    if not (isinstance(loss, Tensor) and loss.requires_grad):
        return None
    loss.backward()
    return model.module.weight.grad


def _judge_gradient(seen):
    if any(gradient is None for gradient in seen):
        return "what came back is no loss that backward can start from"
    whole, *wrong = _gradients_of_sums()
    hints = [
        "each rank's mean weighs alike, however many targets it is made of",
        "the gradient is half of what it should be",
        "the gradient is that of a sum, not of a mean",
        "half the gradient of a sum, where that of a mean should be",
        "targets of -100 were counted",
    ]
    if torch.allclose(seen[0], whole, atol=1e-6):
        return None
    for gradient, hint in zip(wrong, hints, strict=True):
        if torch.allclose(seen[0], gradient, atol=1e-6):
            return hint
    return "the gradient is not that of the mean over all ranks' targets"


def _gradients_of_sums():
    """Return the gradient of the mean over all targets, and those of typical mistakes."""
    sums = []
    for rank in range(2):
        inputs, targets = _shard(rank)
        model = _model()
        total = F.cross_entropy(model(inputs), targets, reduction="sum")
        sums.append(torch.autograd.grad(total, model.weight)[0])
    total = sums[0] + sums[1]
    of_means = (sums[0] / COUNTED[0] + sums[1] / COUNTED[1]) / 2
    return [total / 15, of_means, total / 30, total, total / 2, total / 24]


EXERCISES = {"global_mean_loss": Exercise(_gradient_in_ddp, _judge_gradient)}
