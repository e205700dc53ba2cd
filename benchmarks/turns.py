"""Several training loops take turns in the same processes: a few steps each, while others wait.

The time of a step drifts, so only steps taken at about the same time can be compared.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from random import Random
from threading import Event, Semaphore
from time import perf_counter
from typing import Any

import torch
from side_by_side import Times

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
    work: Callable[..., Times], *args: Any, rounds: int, launches: int
) -> tuple[Times, int]:
    """Start the ranks `launches` times; return the seconds by loop, and the rounds per launch.

    `work` gets `args`, the rounds of a launch and a `seed`, which differs from launch to launch.
    """
    launches = min(launches, rounds)
    part = -(-rounds // launches)
    times: Times = {}
    for seed in range(launches):
        for name, seconds in run_ranks(work, *args, part, seed=seed)[0].items():
            times.setdefault(name, []).extend(seconds)
    return times, part


def take_turns(loops: Mapping[str, Training], rounds: int, seed: int) -> Times:
    """Return the seconds of a step of each loop, by round; a round has a turn of each.

    Each loop runs in a thread of its own; `seed` draws their order. After each of its turns, its
    call of `tick` waits for the next one. Collective: all ranks call, with the same arguments.
    """
    draw, total, failed = Random(seed), steps_of(rounds), Event()
    order = [draw.sample(list(loops), len(loops)) for _ in range(WARM_UP + rounds)]
    turns = chain(*order)
    batons = {name: Semaphore(0) for name in loops}
    times: Times = {name: [] for name in loops}
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def pass_on() -> None:
        if name := next(turns, None):
            batons[name].release()

    def play(name: str, loop: Training) -> None:
        torch.set_num_threads(1)  # of this thread
        if gpu is not None:
            torch.cuda.set_device(gpu)  # of this thread, too
        steps, start = 0, 0.0

        def wait() -> None:
            nonlocal start
            batons[name].acquire()
            if failed.is_set():
                raise Abandoned
            start = perf_counter()

        def tick() -> None:
            nonlocal steps
            steps += 1
            if steps % GROUP:
                return
            if gpu is not None:
                torch.cuda.synchronize()  # wait for the kernels that were only launched
            times[name].append((perf_counter() - start) / GROUP)
            if steps < total:  # the last turn lasts to the end, which may be collective
                pass_on()
                wait()

        try:
            wait()
            loop(tick)
            assert steps == total, f"{name} has trained for {steps} steps"
        except BaseException:
            failed.set()
            for baton in batons.values():
                baton.release()
            raise
        finally:
            pass_on()

    with ThreadPoolExecutor(len(loops)) as pool:
        ends = [pool.submit(play, name, loop) for name, loop in loops.items()]
        pass_on()
    errors = [error for end in ends if (error := end.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, Abandoned)):
        raise error
    return {name: seconds[WARM_UP:] for name, seconds in times.items()}
