"""Several ways of training take turns in one process: a few steps each, while the others wait.

A step varies much, and in waves: only ways that are taken within the same wave can be compared.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Condition
from time import perf_counter

import torch

from ddp_ref import Callback

GROUP = 10  # steps of a turn: `Handler` has one exchange in them
WARM_UP = 3  # turns
Tick = Callable[[], None]  # what a way calls after each step
Training = Callable[[Tick], None]


class Abandoned(Exception):
    """Another way has failed."""


class Ticks(Callback):
    """Have `Handler` call `tick` after each step."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick

    def on_step_end(self) -> None:
        self.tick()


def steps_of(rounds: int) -> int:
    """Return the steps that each way must train for."""
    return GROUP * (WARM_UP + rounds)


def take_turns(ways: Mapping[str, Training], rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Return the seconds of a step of each way, by round; a round has a turn of each.

    Each way is a loop of its own, in a thread; `seed` draws their order. Collective: all ranks
    call, with the same arguments.
    """
    turns = Turns(list(ways), rounds, seed)
    with ThreadPoolExecutor(len(ways)) as pool:
        ends = [pool.submit(turns.play, name, way) for name, way in ways.items()]
    errors = [error for end in ends if (error := end.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, Abandoned)):
        raise error
    return {name: times[WARM_UP:] for name, times in turns.times.items()}


class Turns:
    """Whose turn it is, the same on all ranks, and how long the steps took."""

    def __init__(self, names: Sequence[str], rounds: int, seed: int) -> None:
        draw = Random(seed)
        order = [draw.sample(names, len(names)) for _ in range(WARM_UP + rounds)]
        self._whose = deque(name for each in order for name in each)
        self._steps, self._failed, self._changed = steps_of(rounds), False, Condition()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.times: dict[str, list[float]] = {name: [] for name in names}

    def play(self, name: str, way: Training) -> None:
        """Run a way, which waits in each call of what it is given until it has its turn again."""
        torch.set_num_threads(1)  # of this thread
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # of this thread, too
        steps, start = 0, 0.0

        def tick() -> None:
            nonlocal steps, start
            steps += 1
            if steps % GROUP:
                return
            if self._gpu is not None:
                torch.cuda.synchronize()  # what was only asked for is not done
            self.times[name].append((perf_counter() - start) / GROUP)
            if steps < self._steps:  # the last turn lasts to the end, which may be collective
                self._pass_on()
                self._wait(name)
            start = perf_counter()

        try:
            self._wait(name)
            start = perf_counter()
            way(tick)
            assert steps == self._steps, f"{name} has trained for {steps} steps"
        except BaseException:
            self._failed = True
            raise
        finally:
            self._pass_on()

    def _wait(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._whose[0] == name)
        if self._failed:
            raise Abandoned

    def _pass_on(self) -> None:
        with self._changed:
            self._whose.popleft()
            self._changed.notify_all()
