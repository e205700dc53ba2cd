"""Chapter 13: work that one rank does for all."""

from collections.abc import Callable
from typing import Any

from lesson import Exercise

from ddp_ref import cleanup_ddp, initialize_ddp

FOUND = "10 classes"


def observe(prepare_once: Callable[[Callable[[], str]], Any]) -> tuple[int, Any, str]:
    """Return how often this rank did the work, its result, and what a failing one raised here."""
    initialize_ddp()
    done: list[str] = []

    def work() -> str:
        done.append("work")
        return FOUND

    result = prepare_once(work)
    try:
        prepare_once(_fail)
        raised = "nothing"
    except Exception as error:  # noqa: BLE001 - what it is, is the answer
        raised = type(error).__name__
    cleanup_ddp()
    return len(done), result, raised


def _fail() -> str:
    raise FileNotFoundError("no data here")


def judge(seen: list[tuple[int, Any, str]]) -> str | None:
    (first, result, raised), (second, other_result, other_raised) = seen
    if (first, second) != (1, 0):
        counts = f"{first} on rank 0, {second} on rank 1"
        return f"calls of the work: {counts}. It should run once, on rank 0"
    if raised != "FileNotFoundError":
        return f"the work raised FileNotFoundError on rank 0, but there you raise {raised}"
    if other_raised == "nothing":
        return "the work failed on rank 0, and rank 1 went on as if it had not: it must raise too"
    if other_raised != raised:
        return (
            f"the work raised {raised} on rank 0, but rank 1 raises {other_raised}: "
            "the error itself has to reach every rank"
        )
    for rank, found in enumerate((result, other_result)):
        if found != FOUND:
            return f"the work returned {FOUND!r}, but rank {rank} got {found!r}"
    return None


EXERCISES = {"prepare_once": Exercise(observe, judge)}
