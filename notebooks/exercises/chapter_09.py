"""Chapter 09: work that one rank does for all."""

from collections.abc import Callable
from typing import Any

from lesson import Exercise

from ddp_ref import cleanup_ddp, initialize_ddp

RESULT = "10 classes"


def observe(prepare_once: Callable[[Callable[[], str]], Any]) -> tuple[int, Any, str]:
    """Return how often this rank did the work, its result, and what a failing one raised here."""
    initialize_ddp()
    calls: list[None] = []

    def work() -> str:
        calls.append(None)
        return RESULT

    def failing_work() -> str:
        raise FileNotFoundError("no data here")

    result = prepare_once(work)
    try:
        prepare_once(failing_work)
        raised = "nothing"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        raised = type(error).__name__
    cleanup_ddp()
    return len(calls), result, raised


def judge(seen: list[tuple[int, Any, str]]) -> str | None:
    calls, results, raised = zip(*seen, strict=True)
    if calls != (1, 0):
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
        if result != RESULT:
            return f"the work returned {RESULT!r}, but rank {rank} got {result!r}"
    return None


EXERCISES = {"prepare_once": Exercise(observe, judge)}
