"""A call to a running `ParallelExecutor`, compared with starting processes for each call.

Two workers on the CPU call a function that does nothing, and send its result back. The two bare
pipes show the unavoidable part: each carries a message as large as the pickled function to a
process that only sends it back. accelerate's launcher forks, so its processes do not import torch
again, as spawned processes do.
"""

import io
import multiprocessing
import warnings
from contextlib import redirect_stdout
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp
from side_by_side import AGAIN, compare, find, side_by_side, timed
from tables import Table, goal

from ddp_ref import ParallelExecutor
from ddp_ref.workers.process import dumps

ROUNDS, WORKERS, CALLS, MOST_ROUND_TRIPS = 30, 2, 100, 10
OURS, SPAWN, PIPES = "ParallelExecutor, open", "mp.spawn", "two bare pipes"


def measure(rounds: int) -> list[Table]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        executor = ParallelExecutor(WORKERS)
    pipes = Pipes(WORKERS, len(dumps("nothing", nothing)))
    with executor, pipes:
        run = timed(lambda: executor.run(nothing), CALLS)
        variants = {
            OURS: run,
            OURS + AGAIN: run,
            PIPES: timed(pipes.round_trip, CALLS),
            SPAWN: timed(lambda: mp.spawn(nothing_on_rank, nprocs=WORKERS)),
            "accelerate's notebook_launcher": timed(launch_with_accelerate),
        }
        times = side_by_side(variants, rounds)
    rows = compare(times, OURS)
    spawn, bare = (find(compare(times, base), OURS) for base in (SPAWN, PIPES))
    faster = f"{find(rows, SPAWN).ratio:,.0f} times"
    goals = [
        goal("at least 100 times faster than mp.spawn", faster, spawn.at_most(1 / 100)),
        goal(
            f"at most {MOST_ROUND_TRIPS} round trips of two pipes",
            f"{bare.ratio:.1f}",
            bare.at_most(MOST_ROUND_TRIPS),
        ),
    ]
    return [Table("a call", rows, goals)]


def nothing(device: torch.device | None = None) -> int:
    return 0


def nothing_on_rank(rank: int) -> int:
    return 0


def launch_with_accelerate() -> None:
    from accelerate import notebook_launcher

    with redirect_stdout(io.StringIO()):  # it prints what it starts
        notebook_launcher(nothing, num_processes=WORKERS, use_port="0")


class Pipes:
    """Processes that send back what they get; a context manager."""

    def __init__(self, count: int, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.message = bytes(size)
        self.ends, self.processes = [], []
        for _ in range(count):
            near, far = context.Pipe()
            self.ends.append(near)
            self.processes.append(context.Process(target=send_back, args=(far,), daemon=True))

    def __enter__(self) -> "Pipes":
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for end, process in zip(self.ends, self.processes, strict=True):
            end.send_bytes(b"")
            process.join()

    def round_trip(self) -> None:
        for end in self.ends:
            end.send_bytes(self.message)
        for end in self.ends:
            end.recv_bytes()


def send_back(end: Connection) -> None:
    while message := end.recv_bytes():
        end.send_bytes(message)
