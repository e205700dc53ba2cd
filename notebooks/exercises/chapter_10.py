"""The exercises of chapter 10: what a rank holds, and a step whose parts stand in order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from lesson.buckets import note_and_reduce
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# strategy, ranks, bytes a weight, and what the answer is where it is another
BYTES = [
    ("DDP, bucket view", 2, 16, "a rank of DDP holds another number of bytes"),
    ("DDP, bucket view", 8, 16, "it changes with the ranks, and what a rank of DDP holds does not"),
    ("DDP", 2, 20, "something that plain DDP holds besides is not in it, or twice"),
    ("ZeRO", 2, 12, "ZeRO divides less than that, or more"),
    ("ZeRO", 8, 9, "it is right for 2 ranks alone"),
    ("FSDP2", 4, 4, "FSDP2 divides less than that, or more"),
    ("FSDP2", 64, 0.25, "it is right for 4 ranks alone"),
]


def _run_bytes(bytes_a_weight: Callable[[str, int], float]) -> list[Any]:
    return [bytes_a_weight(strategy, ranks) for strategy, ranks, *_ in BYTES]


def _judge_bytes(seen: list[list[Any]]) -> str | None:
    for answer, (strategy, ranks, right, what) in zip(seen[0], BYTES, strict=True):
        if not isinstance(answer, int | float):
            return f"it returned {answer!r}, not a number"
        if abs(answer - right) > 1e-9:
            return f"for {strategy} on {ranks} ranks it says {answer:g}: {what}"
    return None


STEPS = [(10.0, 2), (0.1, 2), (10.0, 3)]  # limit, which is reached in the second, and parts
SCALE = 1024.0
FIRST = torch.tensor([[1.0, -2.0, 3.0, 0.5]])  # the weights, (1, 4)


class Step(NamedTuple):
    """The weights after a step, and the length of each gradient that was reduced in it."""

    weights: Tensor
    sent: list[float]


def _parts(rank: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's parts, inputs (8, 4) and targets (8, 1); rank 1's are longer."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.rand(3, 8, 4, generator=generator) * (1 + 2 * rank) / 2
    return list(zip(inputs, torch.rand(3, 8, 1, generator=generator), strict=True))[:number]


def _loss_of(net: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = part
    return nn.functional.mse_loss(net(inputs), targets)


def _run_step(clipped_step: Callable[..., None]) -> list[Step]:
    """Take the steps of STEPS."""
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
        clipped_step(net, optimizer, scaler, _parts(dist.get_rank(), number), _loss_of, limit)
        steps.append(Step(model.weight.detach().clone(), list(sent)))
    dist.destroy_process_group()
    return steps


def _judge_step(seen: list[list[Step]]) -> str | None:
    one, two, three = (step.weights for step in seen[0])
    if any(not torch.equal(mine.weights, its.weights) for mine, its in zip(*seen, strict=True)):
        return "the ranks' weights differ: some gradient was never reduced"
    times = [len(step.sent) for step in seen[0]]
    if times != [1, 1, 1]:
        return f"in a step of 2 parts gradients were reduced {times[0]} times"
    if seen[0][0].sent[0] < SCALE / 100:
        return "the gradient that was reduced is not scaled: the scaler has had no part in it"
    gradient, moved = _gradient(FIRST, 2), FIRST - one
    if torch.allclose(moved, 2 * gradient):
        return "below the limit, its step is twice the mean gradient: a sum over the parts"
    if torch.allclose(moved.norm(), torch.tensor(STEPS[0][0] / SCALE)):
        return "far below the limit, its gradient was clipped: the scaled one was measured"
    if not torch.allclose(moved, gradient):
        return "below the limit, its step is not the mean gradient of all parts of all ranks"
    limit = STEPS[1][0]
    gradient, moved = _gradient(one, 2), one - two
    length = moved.norm().item()
    if length > 1.001 * limit:
        return f"a step with the limit {limit} has the length {length:.2f}: nothing was clipped"
    if length < 2 * limit / SCALE:
        return "the clipped step has nearly no length: the scaled gradient was clipped"
    if not torch.allclose(moved, gradient * limit / gradient.norm(), rtol=1e-3):
        return "the clipped step has another direction than the mean gradient: a part was clipped"
    if not torch.allclose(two - three, _gradient(two, 3), rtol=1e-3):
        return "it is right for 2 parts, but not for 3"
    return None


def _gradient(weights: Tensor, number: int) -> Tensor:
    """Return the gradient of the mean loss over `number` parts of both ranks."""
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(weights)
    parts = [part for rank in (0, 1) for part in _parts(rank, number)]
    loss = torch.stack([_loss_of(model, part) for part in parts]).mean()
    (gradient,) = torch.autograd.grad(loss, [model.weight])
    return gradient


EXERCISES = {
    "bytes_a_weight": Exercise(_run_bytes, _judge_bytes, nproc=1),
    "clipped_step": Exercise(_run_step, _judge_step),
}
