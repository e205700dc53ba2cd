"""The exercise of chapter 02: every rank starts with the parameters and buffers of rank 0."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lesson import Exercise
from torch import nn

from ddp_ref import cleanup_ddp, initialize_ddp

State = dict[str, torch.Tensor]
NOT_SAVED = "1.table"  # a buffer that state_dict() leaves out


def observe_start(start_alike: Callable[[nn.Module], Any]) -> tuple[State, State]:
    """Return the state of a model before and after the reader's function; each rank has its own."""
    initialize_ddp()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for _ in range(dist.get_rank() + 1):
        model(torch.rand(8, 3))  # moves the running mean and counts the batch
    model[1].register_buffer("table", torch.rand(2), persistent=False)
    before = _state(model)
    # In a group of its own, the barrier cannot be mistaken for a collective of the reader's. A rank
    # that calls too few collectives waits here, so the others run into the exercise's timeout.
    after_all = dist.new_group()
    start_alike(model)
    dist.barrier(after_all)
    after = _state(model)
    cleanup_ddp()
    return before, after


def _state(model: nn.Module) -> State:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def judge_start(seen: list[tuple[State, State]]) -> str | None:
    (wanted, first), (_, other) = seen
    weights = ["0.weight", "0.bias", "1.weight", "1.bias"]
    buffers = [name for name in wanted if name not in [*weights, NOT_SAVED]]

    def differ(one: State, names: list[str]) -> bool:
        return not all(torch.equal(one[name], other[name]) for name in names)

    if differ(first, weights):
        return (
            "the parameters still differ between the ranks after your function. A broadcast works "
            "in place, so give it the parameters themselves, not copies of them."
        )
    if differ(wanted, weights):
        return (
            "all ranks now hold the same parameters, but not the ones that rank 0 had. Choose the "
            "collective that copies one rank's values, not one that combines all ranks' values."
        )
    if differ(first, buffers):
        return (
            "the parameters are right, but buffers such as BatchNorm's running mean still differ "
            "between the ranks. model.parameters() does not contain them."
        )
    if differ(wanted, buffers):
        return (
            "the parameters are right and all ranks hold the same buffers, but not the buffers of "
            "rank 0."
        )
    if differ(first, [NOT_SAVED]) or differ(wanted, [NOT_SAVED]):
        return (
            "a buffer that was registered with persistent=False did not become rank 0's. "
            "state_dict() leaves such buffers out, and model.buffers() does not."
        )
    return None


EXERCISES = {"start_alike": Exercise(observe_start, judge_start, timeout=30)}
