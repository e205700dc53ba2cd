"""The exercise of chapter 01: parameters without gradient."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lesson import Exercise
from torch import Tensor, nn


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


EXERCISES = {"without_gradient": Exercise(_run_without, _judge_without, nproc=0)}
