"""How long something takes when nothing else disturbs it."""

from collections.abc import Callable
from time import perf_counter


def fastest(work: Callable[[], object], repeats: int, together: int = 1) -> float:
    """Return the seconds of a call in the fastest of `repeats`: other programs only ever add.

    So many calls are timed `together`: one step can be short on a rank whose peers are ahead of it.
    """
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        for _ in range(together):
            work()
        seconds.append(perf_counter() - start)
    return min(seconds) / together
