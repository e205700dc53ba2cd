"""The exercises of chapter 05: a gradient and a loss over unequal shards."""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson import Exercise
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import initialize_ddp

COUNTS = [48, 16]  # samples on each rank
FEWER = [20, 12]  # the same in a second batch
OWN = torch.tensor([[1.0, -2.0, 3.0], [9.0, 2.0, -1.0]])  # (rank, 3): each rank's gradient

# For each case and rank: how many of 12 targets count. The others are -100.
COUNTED = (12, 3, 6), (12, 0, 6)
Seen = list[tuple[float, Tensor] | None]  # for each case: loss and gradient, or None without a loss


def _run_gradient(batch_gradient: Callable[[Tensor, int], Tensor]) -> list[Any]:
    """Return the function's results on this rank, for two batches."""
    dist.init_process_group("gloo")
    dist.barrier()  # connects all ranks, whatever the reader's function does
    rank = dist.get_rank()
    results = [batch_gradient(OWN[rank].clone(), counts[rank]) for counts in (COUNTS, FEWER)]
    dist.destroy_process_group()
    return results


def _judge_gradient(seen: list[list[Any]]) -> str | None:
    if not all(isinstance(result, Tensor) and result.shape == (3,) for result in chain(*seen)):
        return "on some rank, your function did not return a tensor of the gradient's shape."
    got, again = (torch.stack(results) for results in zip(*seen, strict=True))  # (rank, 3) each
    counts, fewer = torch.tensor(COUNTS)[:, None], torch.tensor(FEWER)[:, None]  # (rank, 1)
    weighted = (OWN * counts).sum(0)
    if torch.equal(got, OWN):
        return (
            "every rank returned its own gradient, so nothing was exchanged. The ranks have to add "
            "up something with an all-reduce."
        )
    if torch.allclose(got, OWN.mean(0)):
        return (
            "your function returned the plain mean, in which the gradient of 16 samples weighs as "
            "much as the gradient of 48. Weight each gradient by its count before you add them up."
        )
    if torch.allclose(got, weighted):
        return (
            "your function returned the sum over all samples, not the mean. Divide it by the "
            "number of samples on all ranks together."
        )
    if torch.allclose(got, weighted / counts):
        return (
            "each rank divided the sum by its own number of samples, so the ranks got different "
            "results. A mean over all samples needs the global count, so the ranks have to add up "
            "their counts as well."
        )
    if not torch.allclose(got, weighted / counts.sum()):
        return (
            f"rank 0 returned {got[0].tolist()}, but the gradient of the batch is "
            f"{(weighted / 64).tolist()}."
        )
    if not torch.allclose(again, (OWN * fewer).sum(0) / fewer.sum()):
        return (
            "your function is right for 48 and 16 samples, but not for 20 and 12. The total is not "
            "always 64, so compute it from the counts."
        )
    return None


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


def _run_loss(global_mean_loss: Callable[..., Any]) -> Seen:
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


def _judge_loss(seen: list[Seen]) -> str | None:
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


EXERCISES = {
    "batch_gradient": Exercise(_run_gradient, _judge_gradient),
    "global_mean_loss": Exercise(_run_loss, _judge_loss, nproc=3),
}
