"""The exercises of chapter 05: a loss for unequal counts, and a step in the right order."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson import Exercise
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
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


def _model(outputs: int) -> nn.Linear:
    model = nn.Linear(4, outputs, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 4 * outputs).view(outputs, 4))
    return model


def _run_loss(global_mean_loss: Callable[..., Any]) -> Seen:
    rank = initialize_ddp().rank
    return [_backward(global_mean_loss, *_shard(rank, counted[rank])) for counted in COUNTED]


def _backward(
    global_mean_loss: Callable[..., Any], inputs: Tensor, targets: Tensor
) -> tuple[float, Tensor] | None:
    model = DDP(_model(3))
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
    sums = _gradients_of_sums(COUNTED[0])
    total, mean = sums.sum(0), sums.sum(0) / sum(COUNTED[0])
    means = (sums / torch.tensor(COUNTED[0])[:, None, None]).sum(0)
    hints = [
        (
            means / 3,
            "in your result, each rank's mean has the same weight, although the ranks have "
            "different numbers of targets. Divide the sum of each rank's losses by the number of "
            "targets on all ranks.",
        ),
        (
            means,
            "each rank divided by its own number of targets. A mean over all targets needs the "
            "global count, so the ranks have to add up their counts with an all-reduce.",
        ),
        (
            mean / 3,
            "the gradient is a third of what it should be. DDP divides by the world size, so your "
            "loss has to be multiplied by it first.",
        ),
        (
            total,
            "you got the gradient of the sum over all targets, not of their mean. What is still "
            "missing is a division by the number of targets on all ranks.",
        ),
        (
            total / 3,
            "you got a third of the gradient of the sum. DDP has divided by the world size, but "
            "nothing has divided by the number of targets on all ranks.",
        ),
        (total / 36, "targets of -100 were counted. Count only the other targets."),
        (
            mean * 2 / 3,
            "the gradient is two thirds of what it should be. There are 3 ranks here, so ask "
            "torch.distributed for the world size.",
        ),
    ]
    for gradient, hint in hints:
        if torch.allclose(one[1], gradient, atol=1e-6):
            return hint
    if not torch.allclose(one[1], mean, atol=1e-6):
        return "the gradient is not the gradient of the mean over the targets of all ranks."
    if any(math.isnan(loss) for loss, _ in (rank[1] for rank in seen if rank[1])):
        return (
            "your loss is right, except on a rank where no target counts. The mean of such a rank "
            "is 0 / 0, so its loss is NaN."
        )
    total = _gradients_of_sums(COUNTED[1]).sum(0)
    if torch.allclose(other[1], total / sum(COUNTED[0]), atol=1e-6):
        return "your loss is right for 21 targets, but not for 18. Compute their number each time."
    if not torch.allclose(other[1], total / sum(COUNTED[1]), atol=1e-6):
        return (
            "your loss is right, except if no target of some rank counts. DDP still divides by the "
            "number of all ranks, including that rank."
        )
    return None


def _gradients_of_sums(counted: tuple[int, ...]) -> Tensor:
    """Return the gradient of each rank's summed loss, (rank, 3, 4)."""
    sums = []
    for rank, count in enumerate(counted):
        inputs, targets = _shard(rank, count)
        model = _model(3)
        total = F.cross_entropy(model(inputs), targets, reduction="sum")
        sums.append(torch.autograd.grad(total, model.weight)[0])
    return torch.stack(sums)


# The limit and the number of microbatches of each step; only the second step reaches its limit.
STEPS = [(10.0, 2), (0.1, 2), (10.0, 3)]
SCALE = 1024.0


class Step(NamedTuple):
    """The weights after a step, and the length of each gradient that DDP reduced in it."""

    weights: Tensor
    sent: list[float]


def _parts(rank: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's microbatches: inputs (8, 4) and targets (8, 1); rank 1's are larger."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.rand(3, 8, 4, generator=generator) * (1 + 2 * rank) / 2
    return list(zip(inputs, torch.rand(3, 8, 1, generator=generator), strict=True))[:number]


def _loss_of(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = part
    return F.mse_loss(model(inputs), targets)


def _note_and_reduce(lengths: list[float], bucket: dist.GradBucket) -> Future[Tensor]:
    lengths.append(bucket.buffer().norm().item())
    return allreduce_hook(None, bucket)  # type: ignore[arg-type] # None: the default group


def _run_step(clipped_step: Callable[..., None]) -> list[Step]:
    """Take the steps of STEPS with the reader's function, and one with an infinite gradient."""
    rank, sent = initialize_ddp().rank, list[float]()
    model = DDP(_model(1))
    model.register_comm_hook(sent, _note_and_reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    steps = []
    for limit, number in STEPS:
        sent.clear()
        optimizer.zero_grad()
        try:
            clipped_step(model, optimizer, scaler, _parts(rank, number), _loss_of, limit)
        except RuntimeError as error:
            if "unscale_()" not in str(error):
                raise
            what = "end each step with scaler.update(), which tells the scaler that it is over"
            raise RuntimeError(f"{error} Call unscale_ once in each step, and {what}") from error
        except AssertionError as error:  # the scaler's: it found no gradient
            raise RuntimeError("no gradient. Call backward() for each microbatch") from error
        steps.append(Step(model.module.weight.detach().clone(), list(sent)))
    optimizer.zero_grad()
    infinite = [(inputs * torch.inf, targets) for inputs, targets in _parts(rank, 2)]
    clipped_step(model, optimizer, scaler, infinite, _loss_of, 10.0)
    steps.append(Step(model.module.weight.detach().clone(), []))
    return steps


def _judge_step(seen: list[list[Step]]) -> str | None:
    one, two, three, four = (step.weights for step in seen[0])
    others = (step.weights for step in seen[1])
    if any(
        not torch.equal(mine, its) for mine, its in zip((one, two, three), others, strict=False)
    ):
        return (
            "the ranks end with different weights. DDP never reduced a gradient, because every "
            "backward ran inside no_sync: the last microbatch's backward must run outside it"
        )
    times = [len(step.sent) for step in seen[0][:-1]]
    if times != [1, 1, 1]:
        return (
            f"in a step of 2 microbatches DDP reduced the gradients {times[0]} times. One time is "
            "enough: run forward and backward of all microbatches but the last inside no_sync"
        )
    if seen[0][0].sent[0] < SCALE / 100:
        return (
            "the gradient that DDP reduced is not scaled. Call backward on the loss that "
            "scaler.scale returns, or small float16 gradients become 0"
        )
    first = _model(1).weight.detach()
    gradient, moved = _gradient(first, 0, 1), first - one
    hints = [
        (
            2 * gradient,
            "with 2 microbatches the step is twice as long as the mean gradient. backward adds up "
            "the gradients of the microbatches: divide each loss by the number of microbatches",
        ),
        (
            gradient / 2,
            "with 2 microbatches on 2 ranks the step is half as long as the mean gradient. DDP "
            "already divides by the ranks: divide each loss by the number of microbatches, once",
        ),
        (
            _gradient(first, 1) / 2,
            "the gradient contains only the last microbatch. Do not zero the gradients between "
            "microbatches",
        ),
    ]
    for mistaken, hint in hints:
        if torch.allclose(moved, mistaken):
            return hint
    if torch.allclose(moved.norm(), torch.tensor(STEPS[0][0] / SCALE)):
        return (
            "the gradient is far below the limit, and was clipped all the same. You measured it "
            "while it was still multiplied by the scale: unscale before you clip"
        )
    if not torch.allclose(moved, gradient):
        return (
            "the gradient is below the limit, but the step is not the mean gradient of all "
            "microbatches of all ranks"
        )
    limit = STEPS[1][0]
    gradient, moved = _gradient(one, 0, 1), one - two
    length = moved.norm().item()
    if length > 1.001 * limit:
        return (
            f"with the limit {limit} the step has the length {length:.2f}. Nothing clipped the "
            "gradient between unscale_ and step"
        )
    if not torch.allclose(moved, gradient * limit / gradient.norm(), rtol=1e-3):
        return (
            "the clipped step points in another direction than the mean gradient. You clipped a "
            "single microbatch or a single rank's gradient: clip once, after the last all-reduce"
        )
    if not torch.allclose(two - three, _gradient(two, 0, 1, 2), rtol=1e-3):
        return "it is right for 2 microbatches but not for 3: take their number from len(parts)"
    if not torch.equal(three, four):
        return (
            "an infinite gradient reached the weights: take the step with scaler.step(optimizer), "
            "which skips it then"
        )
    return None


def _gradient(weights: Tensor, *numbers: int) -> Tensor:
    """Return the gradient of the mean loss over these microbatches of both ranks."""
    model = _model(1)
    model.weight.data.copy_(weights)
    parts = [_parts(rank, 3)[number] for rank in (0, 1) for number in numbers]
    loss = torch.stack([_loss_of(model, part) for part in parts]).mean()
    return torch.autograd.grad(loss, [model.weight])[0]


EXERCISES = {
    "global_mean_loss": Exercise(_run_loss, _judge_loss, nproc=3),
    "clipped_step": Exercise(_run_step, _judge_step),
}
