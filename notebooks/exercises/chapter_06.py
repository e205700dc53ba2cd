"""Chapter 06: the gradient of several microbatches, with one synchronization."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import initialize_ddp

MICROBATCHES = 3


class Seen(NamedTuple):
    """What the function left on a rank, and how often DDP synchronized."""

    gradient: Tensor | None
    synchronizations: int
    own: list[Tensor]  # the gradient of each microbatch of this rank alone


def _observe(accumulated_gradient: Callable[..., Any]) -> Seen:
    rank = initialize_ddp().rank
    torch.manual_seed(rank)
    microbatches = list(torch.randn(MICROBATCHES, 4, 2))
    own = []
    for microbatch in microbatches:
        model = _model()
        model(microbatch).square().mean().backward()
        own.append(_gradient(model))
    replica, calls = DDP(_model()), []

    def count_and_reduce(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        calls.append("one bucket, so one call per synchronization")
        return allreduce_hook(group, bucket)

    replica.register_comm_hook(dist.group.WORLD, count_and_reduce)
    accumulated_gradient(replica, lambda batch: replica(batch).square().mean(), microbatches)
    return Seen(_gradient(replica.module), len(calls), own)


def _model() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1)
    return model


def _gradient(model: nn.Module) -> Tensor:
    """Return a copy of the gradient of the only parameter, zeros if it has none."""
    (parameter,) = model.parameters()
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _judge(seen: list[Seen]) -> str | None:
    got = seen[0].gradient
    all_means = torch.stack([torch.stack(rank.own) for rank in seen])  # (rank, microbatch, ...)
    right = all_means.mean((0, 1))
    count = seen[0].synchronizations
    if got is None or not got.any():
        return "there is no gradient. Call backward() for each microbatch."
    if count == 0:
        return (
            "the gradients were never synchronized, so each rank has its own. Run forward and "
            "backward of the last microbatch outside no_sync()."
        )
    if torch.allclose(got, right * MICROBATCHES):
        return (
            f"the gradient is {MICROBATCHES} times too large. backward() adds to .grad, so divide "
            "each loss by the number of microbatches."
        )
    if torch.allclose(got, all_means[:, -1].mean(0)) or torch.allclose(
        got, all_means[:, -1].mean(0) / MICROBATCHES
    ):
        return (
            "the gradient contains only the last microbatch. Do not zero the gradients between "
            "microbatches."
        )
    if not torch.allclose(got, right, atol=1e-6):
        return "the gradient is not the gradient of the mean over all microbatches of all ranks."
    if count > 1:
        return (
            f"the gradient is right, but DDP synchronized {count} times. Run forward and backward "
            "inside no_sync() for all microbatches except the last."
        )
    return None


EXERCISES = {"accumulated_gradient": Exercise(_observe, _judge)}
