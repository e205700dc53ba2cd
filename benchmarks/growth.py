"""How the cost of each operation grows with the number of ranks.

python benchmarks/growth.py                                   2 to 64 ranks, on the terminal
python benchmarks/growth.py --ranks 2 8 --markdown docs/growth.md

All ranks run on this machine and share its cores, so a time is what all ranks need together. On a
cluster each rank has cores of its own. There, what counts is the processor time of the busiest
rank, which this measures as well.
"""

import argparse
import math
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import NamedTuple
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from page import machine, put_between
from tables import duration
from torch import nn
from torch.utils.data import TensorDataset

from ddp_ref import (
    DistInfo,
    Handler,
    cleanup_ddp,
    gather_objects,
    initialize_ddp,
    on_rank,
    reduce_sum,
    run_ranks,
)

RANKS = 2, 4, 8, 16, 32, 64
PREDICTED = 1_000, 10_000
ROUNDS, CALLS = 5, 10
HOST = "127.0.0.1"
ITEMS, FEATURES = 4096, 1024  # of predict's output: 16 MiB
WIDTH = 2048  # of a linear layer: a checkpoint of 16 MiB
OPEN, LAZY = "open the groups", "open the groups, TORCH_GLOO_LAZY_INIT=1"
BARRIER, ON_RANK, SHARED = "bare barrier", "on_rank", "on_rank(broadcast=True)"
REDUCE, GATHER = "reduce_sum of one number", "gather_objects, 100 bytes each"
PREDICT, SAVE, LOAD = "predict, 16 MiB in all", "save, 16 MiB", "load, 16 MiB"
NAMES = OPEN, LAZY, BARRIER, ON_RANK, SHARED, REDUCE, GATHER, PREDICT, SAVE, LOAD
# The busiest rank's work grows with this power of the number of ranks. The rows that are missing
# here move the same bytes whatever the number of ranks, so they are not extrapolated.
POWERS = {OPEN: 2, LAZY: 1, ON_RANK: 1, SHARED: 1, REDUCE: 1, GATHER: 1}
FIGURE = Path("figures", "growth.svg")
IMAGE = (
    "![Processor time of the busiest rank against the number of ranks, measured up to 64 ranks and "
    "predicted up to 10,000. Opening the groups grows with the square of the number of ranks, and "
    f"everything else linearly. The table below has the numbers.]({FIGURE.as_posix()})"
)
MARKS = "<!-- begin of what growth.py has written -->", "<!-- end -->"


class Cost(NamedTuple):
    """What one call costs on one rank, in seconds."""

    elapsed: float
    processor: float  # of all threads of the process


class Costs(NamedTuple):
    """What one world costs."""

    ranks: int
    each: dict[str, Cost]  # by operation: the median of the rounds, on the rank with the most
    memory: float  # the largest of any rank, in MiB, without what the ranks share
    sockets: int  # the most that any rank has open


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="the worlds' sizes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables there too")
    args = parser.parse_args()
    worlds = []
    for ranks in args.ranks:
        with TemporaryDirectory() as folder:
            every = run_ranks(costs_on_rank, folder, free_port(), nproc=ranks)
        with patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "1"}):
            lazy = run_ranks(cost_of_opening, free_port(), nproc=ranks)
        worlds.append(largest(every, lazy))
        print(f"{ranks} ranks: done", flush=True)
    print(f"\n{tables(worlds)}")
    if args.markdown:
        draw(worlds, args.markdown.parent / FIGURE)
        told = f"`benchmarks/growth.py` on {machine(['torch'])}."
        put_between(args.markdown, *MARKS, f"{IMAGE}\n\n{tables(worlds)}\n\n{told}")


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def costs_on_rank(folder: str, port: int) -> Costs:
    """Measure this rank's costs."""
    torch.set_num_threads(1)
    info = open_groups(port)
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
    each = {}
    for name, work in works.items():
        calls = 1 if name in (PREDICT, SAVE, LOAD) else CALLS
        each[name] = middle([together(work, calls) for _ in range(1 + ROUNDS)][1:])
    process = psutil.Process()
    memory = process.memory_full_info().uss / 2**20
    sockets = len(process.net_connections())
    each[OPEN] = cost_of_opening(port)
    return Costs(info.world_size, each, memory, sockets)


def cost_of_opening(port: int) -> Cost:
    """Open and close the groups several times; return what the opening costs on this rank."""
    open_groups(port)
    rounds = []
    for _ in range(ROUNDS):
        dist.barrier()
        cleanup_ddp()
        rounds.append(measured(lambda: open_groups(port)))
    return middle(rounds)


def open_groups(port: int) -> DistInfo:
    """Open the groups with a store on rank 0; that of run_ranks is in the parent process."""
    return initialize_ddp(master_addr=HOST, master_port=port)


def together(work: Callable[[], object], calls: int) -> Cost:
    """Return what a call costs on this rank if all ranks begin at once."""
    dist.barrier()
    return measured(work, calls)


def measured(work: Callable[[], object], calls: int = 1) -> Cost:
    elapsed, processor = perf_counter(), process_time()
    for _ in range(calls):
        work()
    return Cost((perf_counter() - elapsed) / calls, (process_time() - processor) / calls)


def middle(rounds: Sequence[Cost]) -> Cost:
    return Cost(*map(median, zip(*rounds, strict=True)))


def handler_of(inputs: int, outputs: int) -> Handler:
    model = nn.Linear(inputs, outputs, bias=False)
    return Handler(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)


def largest(every: Sequence[Costs], lazy: Sequence[Cost]) -> Costs:
    """Return the costs of the rank that has the most of each."""
    costs = {name: [own.each[name] for own in every] for name in every[0].each} | {LAZY: lazy}
    each = {name: Cost(*map(max, zip(*costs[name], strict=True))) for name in NAMES}
    most = max(own.memory for own in every), max(own.sockets for own in every)
    return Costs(len(every), each, *most)


def tables(worlds: Sequence[Costs]) -> str:
    """Return in Markdown what the busiest rank does, and how long all ranks take together."""
    head = [*(f"{world.ranks} ranks" for world in worlds), "exponent"]
    work = [["the busiest rank", *head, *(f"{ranks:,} ranks" for ranks in PREDICTED)]]
    time = [["all ranks on these cores", *head]]
    for name in NAMES:
        processor = [world.each[name].processor for world in worlds]
        elapsed = [world.each[name].elapsed for world in worlds]
        later = [duration(at(ranks, name, worlds)) if name in POWERS else "" for ranks in PREDICTED]
        work.append([name, *map(duration, processor), exponent(worlds, processor), *later])
        time.append([name, *map(duration, elapsed), exponent(worlds, elapsed)])
    memory, sockets = [world.memory for world in worlds], [world.sockets for world in worlds]
    work.append(["memory", *(f"{mib:.0f} MiB" for mib in memory), exponent(worlds, memory), "", ""])
    later = [f"{sockets_at(ranks):,}" for ranks in PREDICTED]
    work.append(["sockets", *map(str, sockets), exponent(worlds, sockets), *later])
    return f"{markdown(work)}\n\n{markdown(time)}"


def exponent(worlds: Sequence[Costs], values: Sequence[float]) -> str:
    """Return the power of the number of ranks with which the values grow: 1 is linear."""
    first = max(len(worlds) - 3, 0)  # two neighbors would show the noise
    if len(worlds) < 2:
        return ""
    more = worlds[-1].ranks / worlds[first].ranks
    return f"{math.log(values[-1] / values[first]) / math.log(more):.1f}"


def at(ranks: int, name: str, worlds: Sequence[Costs]) -> float:
    """Return the busiest rank's processor time in a world that is too large to measure here."""
    return worlds[-1].each[name].processor * (ranks / worlds[-1].ranks) ** POWERS[name]


def sockets_at(ranks: int) -> int:
    """Return the sockets of a rank: one to each other rank in both groups, and the store's."""
    return 2 * (ranks - 1) + 3


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---", *["--:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(worlds: Sequence[Costs], path: Path) -> None:
    """Draw the processor time of the busiest rank: measured with dots, predicted with dashes."""
    from matplotlib.figure import Figure  # not above: the ranks load this module

    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(POWERS):
        measured = [world.each[name].processor for world in worlds]
        axes.plot([world.ranks for world in worlds], measured, "o-", color=f"C{number}", label=name)
        sizes = worlds[-1].ranks, *PREDICTED
        axes.plot(sizes, [at(ranks, name, worlds) for ranks in sizes], "--", color=f"C{number}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_yticks(
        [1e-3, 1e-2, 1e-1, 1, 60, 3600], ["1 ms", "10 ms", "0.1 s", "1 s", "1 min", "1 h"]
    )
    axes.set_xlabel("ranks")
    axes.set_title("processor time of the busiest rank, per call", fontsize="medium", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
