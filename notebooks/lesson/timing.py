"""How long something takes when nothing else disturbs it."""

from collections.abc import Callable, Sequence
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


def fastest_in_turn(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the seconds of the fastest call of each function.

    They are called in turn, so that a busy moment of the machine slows all of them down.
    """
    rounds = [[fastest(work, 1) for work in works] for _ in range(repeats)]
    return [min(seconds) for seconds in zip(*rounds, strict=True)]
