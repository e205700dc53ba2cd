"""Chapter 09: work that one rank does for all."""

import random
from collections.abc import Callable
from typing import Any

from lesson import Exercise

from ddp_ref import cleanup_ddp, initialize_ddp


def observe(prepare_once: Callable[[Callable[[], str]], Any]) -> tuple[list[str], Any, str]:
    """Return what the work returned on this rank, its result, and what a failing one raised."""
    initialize_ddp()
    returned: list[str] = []  # an entry for each call

    def work() -> str:
        returned.append(f"{random.randrange(100, 1000)} classes")
        return returned[-1]

    def failing_work() -> str:
        raise FileNotFoundError("no data here")

    result = prepare_once(work)
    try:
        prepare_once(failing_work)
        raised = "nothing"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        raised = type(error).__name__
    cleanup_ddp()
    return returned, result, raised


def judge(seen: list[tuple[list[str], Any, str]]) -> str | None:
    returned, results, raised = zip(*seen, strict=True)
    calls = [len(own) for own in returned]
    if calls != [1, 0]:
        counts = f"{calls[0]} on rank 0, {calls[1]} on rank 1"
        return f"calls of the work: {counts}. It should run once, on rank 0"
    if raised[0] != "FileNotFoundError":
        return f"the work raised FileNotFoundError on rank 0, but there you raise {raised[0]}"
    if raised[1] == "nothing":
        return "the work failed on rank 0, and rank 1 went on as if it had not: it must raise too"
    if raised[1] != raised[0]:
        return (
            f"the work raised {raised[0]} on rank 0, but rank 1 raises {raised[1]}: "
            "the error itself has to reach every rank"
        )
    for rank, result in enumerate(results):
        if result != returned[0][0]:
            return f"the work returned {returned[0][0]!r}, but rank {rank} got {result!r}"
    return None


EXERCISES = {"prepare_once": Exercise(observe, judge)}
