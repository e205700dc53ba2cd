"""How the cost of each operation grows with the number of ranks.

python benchmarks/growth.py                                   2 to 64 ranks, on the terminal
python benchmarks/growth.py --ranks 2 8 --markdown docs/growth.md

All ranks run on this machine and share its cores. So a time is what all ranks need together, and
the best possible growth is linear. On a cluster each rank has cores of its own.
"""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from page import machine, put_between
from side_by_side import timed, together
from tables import PACKAGES, duration
from torch import nn
from torch.utils.data import TensorDataset

from ddp_ref import (
    Handler,
    cleanup_ddp,
    gather_objects,
    initialize_ddp,
    on_rank,
    reduce_sum,
    run_ranks,
)

RANKS = 2, 4, 8, 16, 32, 64
ROUNDS, CALLS = 5, 10
ITEMS, FEATURES = 4096, 1024  # of predict's output: 16 MiB
WIDTH = 2048  # of a linear layer: a checkpoint of 16 MiB
OPEN, BARRIER, ON_RANK, SHARED = (
    "open a group",
    "bare barrier",
    "on_rank",
    "on_rank(broadcast=True)",
)
REDUCE, GATHER = "reduce_sum of one number", "gather_objects, 100 bytes each"
PREDICT, SAVE, LOAD = "predict, 16 MiB in all", "save, 16 MiB", "load, 16 MiB"
NAMES = OPEN, BARRIER, ON_RANK, SHARED, REDUCE, GATHER, PREDICT, SAVE, LOAD
MARKS = "<!-- begin of what growth.py has written -->", "<!-- end -->"


class Costs(NamedTuple):
    """What one world costs."""

    ranks: int
    seconds: dict[str, float]  # by operation: the median of the rounds, on the slowest rank
    memory: float  # the largest of any rank, in MiB, without what the ranks share
    sockets: int  # the most that any rank has open


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="the worlds' sizes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table there too")
    args = parser.parse_args()
    worlds = []
    for ranks in args.ranks:
        with TemporaryDirectory() as folder:
            worlds.append(slowest(run_ranks(costs_on_rank, folder, nproc=ranks)))
        print(f"{ranks} ranks: done", flush=True)
    print(f"\n{table(worlds)}")
    if args.markdown:
        told = f"`benchmarks/growth.py` on {machine(PACKAGES)}."
        put_between(args.markdown, *MARKS, f"{table(worlds)}\n\n{told}")


def costs_on_rank(folder: str) -> Costs:
    """Measure this rank's costs."""
    torch.set_num_threads(1)
    info = initialize_ddp()
    saved, small = handler_of(WIDTH, WIDTH), handler_of(1, FEATURES)
    data = TensorDataset(torch.zeros(ITEMS, 1))
    path = Path(folder) / "checkpoint.pt"
    works: dict[str, Callable[[], object]] = {
        BARRIER: dist.barrier,
        ON_RANK: on_rank(0)(int),
        SHARED: on_rank(0, broadcast=True)(int),
        REDUCE: lambda: reduce_sum({"x": 1.0}),
        GATHER: lambda: gather_objects(b"x" * 100),
        PREDICT: lambda: small.predict(data, batch_size=ITEMS // info.world_size),
        SAVE: lambda: saved.save(path),
        LOAD: lambda: saved.load(path),
    }
    seconds = {}
    for name, work in works.items():
        calls = 1 if name in (PREDICT, SAVE, LOAD) else CALLS
        way = together(timed(work, calls))
        seconds[name] = [way() for _ in range(1 + ROUNDS)][1:]
    process = psutil.Process()
    memory = process.memory_full_info().uss / 2**20
    sockets = len(process.net_connections())
    seconds[OPEN] = [open_again() for _ in range(ROUNDS)]
    return Costs(info.world_size, {k: median(v) for k, v in seconds.items()}, memory, sockets)


def handler_of(inputs: int, outputs: int) -> Handler:
    model = nn.Linear(inputs, outputs, bias=False)
    return Handler(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)


def open_again() -> float:
    """Close the group on all ranks and return the seconds that the next opening takes."""
    dist.barrier()
    cleanup_ddp()
    return timed(initialize_ddp)()


def slowest(every: Sequence[Costs]) -> Costs:
    """Return the costs of the rank for which each takes longest."""
    seconds = {name: max(costs.seconds[name] for costs in every) for name in NAMES}
    most = max(costs.memory for costs in every), max(costs.sockets for costs in every)
    return Costs(len(every), seconds, *most)


def table(worlds: Sequence[Costs]) -> str:
    """Return the costs in Markdown, and how each grows: 1 is linear in the number of ranks."""
    head = ["", *(f"{world.ranks} ranks" for world in worlds), "grows as ranks to the power of"]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    for name in NAMES:
        times = [world.seconds[name] for world in worlds]
        lines.append([name, *map(duration, times), exponent(worlds, times)])
    memory = [world.memory for world in worlds]
    lines.append(
        ["memory of a rank", *(f"{size:.0f} MiB" for size in memory), exponent(worlds, memory)]
    )
    sockets = [world.sockets for world in worlds]
    lines.append(["sockets of a rank", *map(str, sockets), exponent(worlds, sockets)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def exponent(worlds: Sequence[Costs], values: Sequence[float]) -> str:
    """Return the exponent of the growth between the last two worlds."""
    if len(worlds) < 2:
        return ""
    more = worlds[-1].ranks / worlds[-2].ranks
    return f"{math.log(values[-1] / values[-2]) / math.log(more):.1f}"


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
