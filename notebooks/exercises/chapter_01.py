"""The exercises of chapter 01: a gradient from unequal parts, and parameters without gradient."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson import Exercise
from torch import Tensor, nn

COUNTS = [48, 16]  # samples on each rank
FEWER = [20, 12]  # the same in a second batch
OWN = torch.tensor([[1.0, -2.0, 3.0], [9.0, 2.0, -1.0]])  # (rank, 3): each rank's gradient


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


class HalfUsed(nn.Module):
    """A model whose forward pass forgets one of its layers."""

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
# model, loss, the right answer, and the hint for any other answer
CASES: list[tuple[Callable[[], nn.Module], Callable[..., Tensor], list[str], str]] = [
    (
        _linear,
        F.mse_loss,
        [],
        "your function names parameters of a linear model in which all parameters learn.",
    ),
    (
        _linear,
        F.cross_entropy,
        ["weight", "bias"],
        "your function accepts a gradient that is there, but all zeros. Such a gradient does not "
        "move its parameter either.",
    ),
    (
        _linear,
        _one_above_zero,
        ["weight", "bias"],
        "your function misses a loss that stays at 1 whatever the weights are. Look at the "
        "gradients, not at the value of the loss.",
    ),
    (
        HalfUsed,
        F.mse_loss,
        FORGOTTEN,
        "your function misses a layer that the forward pass leaves out. After backward, the "
        "gradient of such a layer is None.",
    ),
    (
        _frozen,
        F.mse_loss,
        [],
        "your function names a parameter that is frozen on purpose. Which attribute tells you that "
        "a parameter should not learn?",
    ),
    (
        _trained_before,
        F.mse_loss,
        FORGOTTEN,
        "your function takes a gradient left by an earlier step for a new one. Clear the gradients "
        "first.",
    ),
]


def _run_without(without_gradient: Callable[..., list[str]]) -> list[Any]:
    """Return the function's answers to all cases."""
    torch.manual_seed(0)
    inputs, targets = torch.rand(8, 20), torch.rand(8, 1)
    return [without_gradient(make(), loss_fn, inputs, targets) for make, loss_fn, *_ in CASES]


def _judge_without(seen: list[list[Any]]) -> str | None:
    for answer, (*_, right, hint) in zip(seen[0], CASES, strict=True):
        if not isinstance(answer, list):
            return f"your function returned a {type(answer).__name__}, not a list of names."
        if sorted(answer) != sorted(right):
            return hint
    return None


EXERCISES = {
    "batch_gradient": Exercise(_run_gradient, _judge_gradient),
    "without_gradient": Exercise(_run_without, _judge_without, nproc=1),
}
