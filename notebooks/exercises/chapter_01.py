"""The exercises of chapter 01: a gradient from unequal parts, and what a loss does not reach."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson import Exercise
from torch import Tensor, nn

COUNTS = [48, 16]  # samples, by rank
FEWER = [20, 12]  # in a second batch
OWN = torch.tensor([[1.0, -2.0, 3.0], [9.0, 2.0, -1.0]])  # (rank, 3): means over these samples


def _run_gradient(batch_gradient: Callable[[Tensor, int], Tensor]) -> list[Any]:
    """Return what the function makes of this rank's gradient and count, in two batches."""
    dist.init_process_group("gloo")
    dist.barrier()  # all are connected, whatever the reader's function does
    rank = dist.get_rank()
    results = [batch_gradient(OWN[rank].clone(), counts[rank]) for counts in (COUNTS, FEWER)]
    dist.destroy_process_group()
    return results


def _judge_gradient(seen: list[list[Any]]) -> str | None:
    if not all(isinstance(result, Tensor) and result.shape == (3,) for result in chain(*seen)):
        return "not every rank returned a tensor of the gradient's shape"
    got, again = (torch.stack(results) for results in zip(*seen, strict=True))  # (rank, 3) each
    counts, fewer = torch.tensor(COUNTS)[:, None], torch.tensor(FEWER)[:, None]  # (rank, 1)
    weighted = (OWN * counts).sum(0)
    if torch.equal(got, OWN):
        return "every rank got its own gradient back: nothing was exchanged"
    if torch.allclose(got, OWN.mean(0)):
        return "that is the plain mean: 16 samples weigh as much as 48"
    if torch.allclose(got, weighted):
        return "that is the sum over the samples, not their mean"
    if torch.allclose(got, weighted / counts):
        return "each rank divided by its own count, so the ranks do not agree"
    if not torch.allclose(got, weighted / counts.sum()):
        return f"rank 0 returned {got[0].tolist()}, the batch's is {(weighted / 64).tolist()}"
    if not torch.allclose(again, (OWN * fewer).sum(0) / fewer.sum()):
        return "it is right for 48 and 16 samples, but not for 20 and 12"
    return None


class HalfUsed(nn.Module):
    """A model with a layer that its forward pass forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.forgotten = nn.Linear(20, 1), nn.Linear(20, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def _one_above_zero(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) + 1


def _frozen() -> nn.Module:
    model = nn.Linear(20, 1)
    model.bias.requires_grad_(False)
    return model


def _trained_before() -> nn.Module:
    model = HalfUsed()
    model.forgotten.weight.grad = torch.ones(1, 20)
    model.forgotten.bias.grad = torch.ones(1)
    return model


def _linear() -> nn.Module:
    return nn.Linear(20, 1)


FORGOTTEN = ["forgotten.weight", "forgotten.bias"]
# model, loss, the right answer, and the hint where the answer is another
CASES: list[tuple[Callable[[], nn.Module], Callable[..., Tensor], list[str], str]] = [
    (_linear, F.mse_loss, [], "it names parameters of a linear model that does learn"),
    (_linear, F.cross_entropy, ["weight", "bias"], "a gradient that is there, but zero, passes"),
    (_linear, _one_above_zero, ["weight", "bias"], "a loss that stays at 1 passes"),
    (HalfUsed, F.mse_loss, FORGOTTEN, "a layer that the forward pass leaves out passes"),
    (_frozen, F.mse_loss, [], "it names a parameter that is frozen on purpose"),
    (_trained_before, F.mse_loss, FORGOTTEN, "a gradient left by an earlier step passes for new"),
]


def _run_without(without_gradient: Callable[..., list[str]]) -> list[Any]:
    """Return the function's answers to all cases."""
    torch.manual_seed(0)
    inputs, targets = torch.rand(8, 20), torch.rand(8, 1)
    return [without_gradient(make(), loss_fn, inputs, targets) for make, loss_fn, *_ in CASES]


def _judge_without(seen: list[list[Any]]) -> str | None:
    for answer, (*_, right, hint) in zip(seen[0], CASES, strict=True):
        if not isinstance(answer, list):
            return f"it returned a {type(answer).__name__}, not a list of names"
        if sorted(answer) != sorted(right):
            return hint
    return None


EXERCISES = {
    "batch_gradient": Exercise(_run_gradient, _judge_gradient),
    "without_gradient": Exercise(_run_without, _judge_without, nproc=1),
}
