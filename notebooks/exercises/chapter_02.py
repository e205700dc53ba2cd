"""The exercise of chapter 02: the variables by which processes meet."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from lesson import Exercise

WORLD_SIZE = 3
OTHER_SIZE, OTHER_PORT = 4, 29_517  # only compared: nobody meets there
WHY = {
    "RANK": "a process does not know which rank it is",
    "LOCAL_RANK": "a process does not know which GPU of its machine it should take",
    "WORLD_SIZE": "a process does not know how many others to wait for",
    "MASTER_ADDR": "a process does not know on which machine the store is",
    "MASTER_PORT": "a process does not know at which port the store listens",
}


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
    "environment_for": Exercise(observe_environment, judge_environment, nproc=WORLD_SIZE),
}
