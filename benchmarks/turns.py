"""Several training loops take turns in the same processes: a few steps each, while others wait.

The time of a step drifts, so only steps taken at about the same time can be compared.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Condition
from time import perf_counter
from typing import Any

import torch

from ddp_ref import Callback, run_ranks

GROUP = 10  # steps of a turn, so that each of `Handler`'s turns has one summary over all ranks
WARM_UP = 3  # turns
Tick = Callable[[], None]  # a loop calls it after each step
Training = Callable[[Tick], None]


class Abandoned(Exception):
    """Another loop has failed."""


class Ticks(Callback):
    """Have `Handler` call `tick` after each step."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick

    def on_step_end(self) -> None:
        self.tick()


def steps_of(rounds: int) -> int:
    """Return the number of steps that each loop must train for."""
    return GROUP * (WARM_UP + rounds)


def in_launches(
    work: Callable[..., dict[str, list[float]]],
    *args: Any,
    rounds: int,
    launches: int,
    nproc: int,
) -> tuple[dict[str, list[float]], int]:
    """Start the ranks `launches` times; return the seconds by loop, and the rounds per launch.

    `work` gets `args`, the rounds of a launch and a `seed`, which differs from launch to launch.
    """
    launches = min(launches, rounds)
    part = -(-rounds // launches)
    times: dict[str, list[float]] = {}
    for seed in range(launches):
        for name, seconds in run_ranks(work, *args, part, seed=seed, nproc=nproc)[0].items():
            times.setdefault(name, []).extend(seconds)
    return times, part


def take_turns(loops: Mapping[str, Training], rounds: int, seed: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each loop, by round; a round has a turn of each.

    Each loop runs in a thread of its own; `seed` draws their order. Collective: all ranks call,
    with the same arguments.
    """
    turns = Turns(list(loops), rounds, seed)
    with ThreadPoolExecutor(len(loops)) as pool:
        ends = [pool.submit(turns.play, name, loop) for name, loop in loops.items()]
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

    def play(self, name: str, loop: Training) -> None:
        """Run a loop. After each of its turns, its call of `tick` waits for the next one."""
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
                torch.cuda.synchronize()  # wait for the kernels that were only launched
            self.times[name].append((perf_counter() - start) / GROUP)
            if steps < self._steps:  # the last turn lasts to the end, which may be collective
                self._pass_on()
                self._wait(name)
            start = perf_counter()

        try:
            self._wait(name)
            start = perf_counter()
            loop(tick)
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
