"""A call to an open `ParallelExecutor`, compared with starting two processes for each call.

The function does nothing. accelerate's launcher forks, so its processes do not import torch again.
"""

import io
import warnings
from contextlib import redirect_stdout

import torch
import torch.multiprocessing as mp
from side_by_side import AGAIN, compare, find, side_by_side, timed
from tables import Table, goal

from ddp_ref import ParallelExecutor

ROUNDS, WORKERS, CALLS = 30, 2, 100
OURS, SPAWN = "ParallelExecutor, open", "mp.spawn"


def measure(rounds: int) -> list[Table]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        executor = ParallelExecutor(WORKERS)
    with executor:
        run = timed(lambda: executor.run(nothing), CALLS)
        variants = {
            OURS: run,
            OURS + AGAIN: run,
            SPAWN: timed(lambda: mp.spawn(nothing, nprocs=WORKERS)),
            "accelerate's notebook_launcher": timed(launch_with_accelerate),
        }
        times = side_by_side(variants, rounds)
    rows = compare(times)
    ours = find(compare({name: times[name] for name in (SPAWN, OURS)}), OURS)
    faster = f"{find(rows, SPAWN).ratio:,.0f} times"
    reached = goal("at least 100 times faster than mp.spawn", faster, ours.at_most(1 / 100))
    return [Table("a call", rows, [reached])]


def nothing(rank: int = 0, device: torch.device | None = None) -> int:
    return 0


def launch_with_accelerate() -> None:
    from accelerate import notebook_launcher

    with redirect_stdout(io.StringIO()):  # it prints what it starts
        notebook_launcher(nothing, num_processes=WORKERS, use_port="0")
