"""How long something takes when nothing else disturbs it."""

from collections.abc import Callable
from time import perf_counter


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` calls: other programs only ever add to one."""
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return min(seconds)
