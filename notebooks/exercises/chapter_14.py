"""The exercise of chapter 14: a training step whose parts are in the right order."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from lesson.buckets import note_and_reduce
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# The limit and the number of microbatches of each step; only the second step reaches its limit.
STEPS = [(10.0, 2), (0.1, 2), (10.0, 3)]
SCALE = 1024.0
FIRST = torch.tensor([[1.0, -2.0, 3.0, 0.5]])  # the weights, (1, 4)


class Step(NamedTuple):
    """The weights after a step, and the length of each gradient that DDP reduced in it."""

    weights: Tensor
    sent: list[float]


def _parts(rank: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's microbatches: inputs (8, 4) and targets (8, 1); rank 1's are larger."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.rand(3, 8, 4, generator=generator) * (1 + 2 * rank) / 2
    return list(zip(inputs, torch.rand(3, 8, 1, generator=generator), strict=True))[:number]


def _loss_of(net: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = part
    return nn.functional.mse_loss(net(inputs), targets)


def _run_step(clipped_step: Callable[..., None]) -> list[Step]:
    """Take the steps of STEPS with the reader's function."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(FIRST)
    sent: list[float] = []
    net, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=1.0)
    net.register_comm_hook(lambda b: sent.append(b.buffer().norm().item()), note_and_reduce)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    steps = []
    for limit, number in STEPS:
        sent.clear()
        optimizer.zero_grad()
        try:
            clipped_step(net, optimizer, scaler, _parts(dist.get_rank(), number), _loss_of, limit)
        except RuntimeError as error:
            if "unscale_()" not in str(error):
                raise
            what = "end each step with scaler.update(), which tells the scaler that it is over"
            raise RuntimeError(f"{error} Call unscale_ once in each step, and {what}") from error
        steps.append(Step(model.weight.detach().clone(), list(sent)))
    dist.destroy_process_group()
    return steps


def _judge_step(seen: list[list[Step]]) -> str | None:
    one, two, three = (step.weights for step in seen[0])
    if any(not torch.equal(mine.weights, its.weights) for mine, its in zip(*seen, strict=True)):
        return (
            "the ranks end with different weights. DDP never reduced a gradient, because every "
            "backward ran inside no_sync: the last microbatch's backward must run outside it"
        )
    times = [len(step.sent) for step in seen[0]]
    if times != [1, 1, 1]:
        return (
            f"in a step of 2 microbatches DDP reduced the gradients {times[0]} times. One time is "
            "enough: no_sync holds DDP back until the last microbatch's backward"
        )
    if seen[0][0].sent[0] < SCALE / 100:
        return (
            "the gradient that DDP reduced is not scaled. Call backward on the loss that "
            "scaler.scale returns, or small float16 gradients become 0"
        )
    gradient, moved = _gradient(FIRST, 2), FIRST - one
    if torch.allclose(moved, 2 * gradient):
        return (
            "with 2 microbatches the step is twice as long as the mean gradient. backward adds up "
            "the gradients of the microbatches: divide each loss by the number of microbatches"
        )
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
    gradient, moved = _gradient(one, 2), one - two
    length = moved.norm().item()
    if length > 1.001 * limit:
        return (
            f"with the limit {limit} the step has the length {length:.2f}. Nothing clipped the "
            "gradient between unscale_ and step"
        )
    if length < 2 * limit / SCALE:
        return (
            "the clipped step is nearly 0. You clipped the scaled gradient, and the scaler then "
            "divided it by the scale: unscale before you clip"
        )
    if not torch.allclose(moved, gradient * limit / gradient.norm(), rtol=1e-3):
        return (
            "the clipped step points in another direction than the mean gradient. You clipped a "
            "single microbatch or a single rank's gradient: clip once, after the last all-reduce"
        )
    if not torch.allclose(two - three, _gradient(two, 3), rtol=1e-3):
        return "it is right for 2 microbatches but not for 3: take their number from len(parts)"
    return None


def _gradient(weights: Tensor, number: int) -> Tensor:
    """Return the gradient of the mean loss over `number` microbatches of both ranks."""
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(weights)
    parts = [part for rank in (0, 1) for part in _parts(rank, number)]
    loss = torch.stack([_loss_of(model, part) for part in parts]).mean()
    (gradient,) = torch.autograd.grad(loss, [model.weight])
    return gradient


EXERCISES = {
    "clipped_step": Exercise(_run_step, _judge_step),
}
