"""The exercises of chapter 02: an equal start, and the variables by which processes meet."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from torch import nn

State = dict[str, torch.Tensor]
NOT_SAVED = "1.table"  # a buffer that state_dict() leaves out

WORLD_SIZE = 3
OTHER_SIZE, OTHER_PORT = 4, 29_517  # only compared: nobody meets there
WHY = {
    "RANK": "a process does not know which rank it is",
    "LOCAL_RANK": "a process does not know which GPU of its machine it should take",
    "WORLD_SIZE": "a process does not know how many others to wait for",
    "MASTER_ADDR": "a process does not know on which machine the store is",
    "MASTER_PORT": "a process does not know at which port the store listens",
}


def observe_start(start_alike: Callable[[nn.Module], Any]) -> tuple[State, State]:
    """Return the state of a model before and after the reader's function; each rank has its own."""
    dist.init_process_group("gloo")
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
    dist.destroy_process_group()
    return before, after


def _state(model: nn.Module) -> State:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def judge_start(seen: list[tuple[State, State]]) -> str | None:
    (wanted, first), *others = seen
    weights = ["0.weight", "0.bias", "1.weight", "1.bias"]
    buffers = [name for name in wanted if name not in [*weights, NOT_SAVED]]

    def differ(one: State, names: list[str]) -> bool:
        return not all(torch.equal(one[n], other[n]) for _, other in others for n in names)

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


class Meeting(NamedTuple):
    """What the reader's function returned, by rank, and what came of it."""

    variables: list[Any]  # for a job of WORLD_SIZE ranks
    others: list[Any]  # for another job
    port: int
    error: str | None  # of the meeting, which takes place if the variables look right


def observe_environment(environment_for: Callable[[int, int, int], Any]) -> Meeting:
    """Ask for every rank's variables, and if they look right, open a group with this rank's."""
    # This run's own store listens at this port, so no rank has to host another one.
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    variables = [environment_for(other, WORLD_SIZE, port) for other in range(WORLD_SIZE)]
    others = [environment_for(other, OTHER_SIZE, OTHER_PORT) for other in range(OTHER_SIZE)]
    if _find_mistake(variables, port) or _find_mistake(others, OTHER_PORT):
        return Meeting(variables, others, port, None)
    os.environ.update(variables[rank])
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=5))
        dist.destroy_process_group()
    except dist.DistError as error:
        return Meeting(variables, others, port, str(error).splitlines()[0])
    return Meeting(variables, others, port, None)


def judge_environment(seen: list[Meeting]) -> str | None:
    first = seen[0]
    mistake = _find_mistake(first.variables, first.port) or _find_mistake(first.others, OTHER_PORT)
    if mistake:
        return mistake
    errors = [meeting.error for meeting in seen if meeting.error]
    if errors:
        address = first.variables[0]["MASTER_ADDR"]
        return (
            f"the variables look complete, but the processes did not meet at MASTER_ADDR "
            f"{address!r}. All of them run on this machine. The error was: {errors[0]}"
        )
    return None


def _find_mistake(variables: list[Any], port: int) -> str | None:
    """Return a hint on the first thing that is wrong with the variables of a job, by rank."""
    size = len(variables)
    for own in variables:
        if not isinstance(own, dict):
            return f"your function returned a {type(own).__name__}, but it should return a dict."
        for name, why in WHY.items():
            if name not in own:
                return f"{name} is missing, so {why}."
            if not isinstance(own[name], str):
                return (
                    f"{name} is the {type(own[name]).__name__} {own[name]!r}, but environment "
                    "variables are text: os.environ accepts nothing else. Use str()."
                )
    by_name = {name: [own[name] for own in variables] for name in WHY}
    ranks = [str(rank) for rank in range(size)]
    if set(by_name["WORLD_SIZE"]) != {str(size)}:
        return (
            f"WORLD_SIZE is {' and '.join(sorted(set(by_name['WORLD_SIZE'])))}, but the job has "
            f"{size} processes. All of them count, rank 0 too, and all must say the same."
        )
    if by_name["RANK"] != ranks:
        return (
            f"your processes claim the ranks {', '.join(by_name['RANK'])}. Ranks count from 0, and "
            f"each must appear exactly once: here {', '.join(ranks)}."
        )
    if by_name["LOCAL_RANK"] != ranks:
        return (
            f"LOCAL_RANK is {', '.join(by_name['LOCAL_RANK'])} for ranks {', '.join(ranks)}. It "
            "numbers the processes of one machine, and all of these run on one machine."
        )
    if len(set(by_name["MASTER_PORT"])) > 1:
        return (
            f"MASTER_PORT is {', '.join(by_name['MASTER_PORT'])} for ranks {', '.join(ranks)}, so "
            "each looks for the store somewhere else. They must all meet at one port."
        )
    if set(by_name["MASTER_PORT"]) != {str(port)}:
        return f"MASTER_PORT is {by_name['MASTER_PORT'][0]}, but the caller asked for port {port}."
    if len(set(by_name["MASTER_ADDR"])) > 1:
        return (
            "the processes have different values of MASTER_ADDR. It is not a process's own "
            "address, but the address of the store, so it is the same for all."
        )
    return None


EXERCISES = {
    "start_alike": Exercise(observe_start, judge_start, nproc=3, timeout=10),
    "environment_for": Exercise(observe_environment, judge_environment, nproc=WORLD_SIZE),
}
