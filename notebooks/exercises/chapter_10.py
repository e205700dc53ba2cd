"""Chapter 10: replicas that stay equal."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from lesson import Exercise
from torch import nn

from ddp_ref import initialize_ddp

LIMIT = timedelta(seconds=20)  # of a collective that not all ranks call


def observe_replicas_equal(replicas_equal: Callable[..., Any]) -> dict[str, tuple[bool, bool]]:
    """Return, for each way in which replicas may differ, the answer and whether a weight moved."""
    rank = initialize_ddp(LIMIT).rank
    seen = {}
    for case in ("none", "last", "second", "small", "swapped"):
        model = _model()
        if rank == 1:
            _change(model, case)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        answer = bool(replicas_equal(model))
        pairs = zip(before, model.parameters(), strict=True)
        seen[case] = answer, not all(torch.equal(old, new) for old, new in pairs)
    return seen


def judge_replicas_equal(ranks: list[dict[str, tuple[bool, bool]]]) -> str | None:
    """Find a wrong answer, ranks that disagree, or a model that was changed by looking at it."""
    if any(moved for rank in ranks for _, moved in rank.values()):
        return (
            "your function changed the model that it should only inspect. A collective writes "
            "into the tensor that you pass, so pass a clone."
        )
    for case in ranks[0]:
        answers = [rank[case][0] for rank in ranks]
        if len(set(answers)) > 1:
            return (
                f"the ranks disagree: rank 0 returned {answers[0]}, rank 1 returned {answers[1]}. "
                "Rank 0 equals itself. Compare results that all ranks have in common, such as the "
                "maximum and the minimum over the ranks."
            )
    if not ranks[0]["none"][0]:
        return (
            "your function returned False for equal replicas. Before you compare, check what the "
            "collective did to each tensor: a sum over two ranks is twice as large as a replica."
        )
    unseen = {
        "last": "the last parameter differed and your function returned True. Look at every "
        "parameter, not only at the first.",
        "second": "the second of four parameters differed and your function returned True. Look "
        "at every parameter.",
        "swapped": "two weights had changed places and your function returned True. A sum cannot "
        "see that: compare element by element.",
        "small": "a weight differed in the seventh digit and your function returned True. Drift "
        "begins small, so compare exactly, without a tolerance.",
    }
    return next((hint for case, hint in unseen.items() if ranks[0][case][0]), None)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@torch.no_grad()
def _change(model: nn.Module, case: str) -> None:
    first, second, _, last = model.parameters()
    if case == "last":
        last.add_(1.0)
    elif case == "second":
        second.add_(1.0)
    elif case == "small":
        first[0, 0].mul_(1 + 2.0**-22)  # two units in the last place of a float32
    elif case == "swapped":
        first[0, :2] = first[0, :2].flip(0)


EXERCISES = {"replicas_equal": Exercise(observe_replicas_equal, judge_replicas_equal)}
