"""The exercises of chapter 10: what a rank holds, and a step whose parts stand in order."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lesson import Exercise
from lesson.buckets import note_and_reduce
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

# strategy, ranks, bytes a weight, and the hint where the answer is another
BYTES = [
    ("DDP, bucket view", 2, 16, "four numbers a weight, two of them Adam's, make 16 bytes in DDP"),
    ("DDP, bucket view", 8, 16, "it divides by the ranks what every rank of DDP holds whole"),
    ("DDP", 2, 20, "plain DDP's buckets are missing: gradients that are no views lie there twice"),
    ("ZeRO", 2, 12, "ZeRO divides Adam's state, and nothing else"),
    ("ZeRO", 8, 9, "ZeRO's answer is right for 2 ranks alone"),
    ("FSDP2", 4, 4, "FSDP2 holds a share of the weights, the gradients and Adam's state"),
    ("FSDP2", 64, 0.25, "FSDP2's answer is right for 4 ranks alone"),
]


def _run_bytes(bytes_a_weight: Callable[[str, int], float]) -> list[Any]:
    return [bytes_a_weight(strategy, ranks) for strategy, ranks, *_ in BYTES]


def _judge_bytes(seen: list[list[Any]]) -> str | None:
    for answer, (_, _, right, hint) in zip(seen[0], BYTES, strict=True):
        if not isinstance(answer, int | float):
            return f"it returned {answer!r}, not a number"
        if abs(answer - right) > 1e-9:
            return hint
    return None


LIMITS = [10.0, 0.1]  # the first is never reached
SCALE = 1024.0
FIRST = torch.tensor([[1.0, -2.0, 3.0, 0.5]])  # the weights, (1, 4)
Step = tuple[Tensor, int]  # the weights after it, and how often a bucket was reduced


def _parts(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's two parts, inputs (8, 4) and targets (8, 1); rank 1's are longer."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.rand(2, 8, 4, generator=generator) * (1 + 2 * rank) / 2
    return list(zip(inputs, torch.rand(2, 8, 1, generator=generator), strict=True))


def _loss_of(net: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = part
    return nn.functional.mse_loss(net(inputs), targets)


def _run_step(clipped_step: Callable[..., None]) -> list[Step]:
    """Take a step a limit."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(FIRST)
    reduced: list[int] = []
    net, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=1.0)
    net.register_comm_hook(lambda bucket: reduced.append(bucket.index()), note_and_reduce)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    steps = []
    for limit in LIMITS:
        reduced.clear()
        optimizer.zero_grad()
        clipped_step(net, optimizer, scaler, _parts(dist.get_rank()), _loss_of, limit)
        steps.append((model.weight.detach().clone(), len(reduced)))
    dist.destroy_process_group()
    return steps


def _judge_step(seen: list[list[Step]]) -> str | None:
    (one, reduced), (two, again) = seen[0]
    if any(not torch.equal(mine[0], its[0]) for mine, its in zip(*seen, strict=True)):
        return "the ranks' weights differ: some gradient was never reduced"
    if (reduced, again) != (1, 1):
        return f"a step of 2 parts was reduced {max(reduced, again)} times: once is enough"
    gradient, moved = _gradient(FIRST), FIRST - one
    if torch.allclose(moved, 2 * gradient):
        return "below the limit, its step is twice the mean gradient: a sum over the parts"
    if torch.allclose(moved.norm(), torch.tensor(LIMITS[0] / SCALE)):
        return "far below the limit, its gradient was clipped: the scaled one was measured"
    if not torch.allclose(moved, gradient):
        return "below the limit, its step is not the mean gradient of all parts of all ranks"
    gradient, moved = _gradient(one), one - two
    length = moved.norm().item()
    if length > 1.001 * LIMITS[1]:
        return f"a step with the limit {LIMITS[1]} has the length {length:.2f}: nothing was clipped"
    if length < 2 * LIMITS[1] / SCALE:
        return "the clipped step has nearly no length: the scaled gradient was clipped"
    if not torch.allclose(moved, gradient * LIMITS[1] / gradient.norm(), rtol=1e-3):
        return "the clipped step has another direction than the mean gradient: a part was clipped"
    return None


def _gradient(weights: Tensor) -> Tensor:
    """Return the gradient of the mean loss over all parts of both ranks."""
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(weights)
    parts = [part for rank in (0, 1) for part in _parts(rank)]
    loss = torch.stack([_loss_of(model, part) for part in parts]).mean()
    (gradient,) = torch.autograd.grad(loss, [model.weight])
    return gradient


EXERCISES = {
    "bytes_a_weight": Exercise(_run_bytes, _judge_bytes, nproc=1),
    "clipped_step": Exercise(_run_step, _judge_step),
}
