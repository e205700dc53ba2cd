"""How the cost of each operation grows with the number of ranks.

python benchmarks/growth.py                                   2 to 64 ranks, on the terminal
python benchmarks/growth.py --ranks 2 8 --markdown docs/growth.md

All ranks run on this machine and share its cores, so a time is what all ranks need together. On a
cluster each rank has cores of its own. There, what counts is the CPU time of the busiest rank,
which this measures as well.
"""

import argparse
import math
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
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
from page import BUILD, machine, put_between, require_marks, warn_if_busy
from tables import duration, grid
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
from ddp_ref.training.loss_and_metrics import RunningSums

RANKS = 2, 4, 8, 16, 32, 64
PREDICTED = 1_000, 10_000
ROUNDS, CALLS = 5, 10
HOST = "127.0.0.1"
ITEMS, FEATURES = 4096, 1024  # of predict's output: 16 MiB
WIDTH = 2048  # of a linear layer: a checkpoint of 16 MiB
LAZY_INIT = "TORCH_GLOO_LAZY_INIT"
OPEN = "open the group and call on_rank"
LAZY = f"{OPEN}, {LAZY_INIT}=1"
BARRIER, ON_RANK, SHARED = "bare barrier", "on_rank", "on_rank(broadcast=True)"
REDUCE, GATHER = "reduce_sum of one number", "gather_objects, 100 bytes each"
SUMMARY = "Handler's summary, every ten steps"
PREDICT, SAVE, LOAD = "predict, 16 MiB in all", "save, 16 MiB", "load, 16 MiB"
NAMES = OPEN, LAZY, BARRIER, ON_RANK, SHARED, REDUCE, GATHER, SUMMARY, PREDICT, SAVE, LOAD
# The work of the busiest rank grows with this power of the number of ranks. A barrier's work grows
# more slowly, so we do not predict it.
POWERS = {name: 2 if name == OPEN else 1 for name in NAMES if name != BARRIER}
FIGURE = Path("figures", "growth.svg")
MARKS = "<!-- begin of what growth.py has written -->", "<!-- end -->"


class Cost(NamedTuple):
    """What one call costs on one rank, in seconds."""

    elapsed: float
    cpu: float  # of all threads of the process


class Costs(NamedTuple):
    """What one world costs."""

    ranks: int
    each: dict[str, Cost]  # by operation: the median of the rounds, on the rank with the most
    memory: float  # the largest of any rank, in MiB, without what the ranks share
    sockets: int  # the most that any rank has open


def main() -> None:
    args = parse()
    warn_if_busy()
    worlds = []
    for ranks in args.ranks:
        worlds.append(measure(ranks))
        print(f"{ranks} ranks: done", flush=True)
    print(f"\n{tables(worlds)}")
    if args.markdown:
        draw(worlds, args.markdown.parent / FIGURE)
        about = f"`benchmarks/growth.py` on {machine(['torch'])}."
        put_between(args.markdown, *MARKS, f"{image(worlds)}\n\n{tables(worlds)}\n\n{about}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="the worlds' sizes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables there too")
    args = parser.parse_args()
    if list(args.ranks) != sorted(set(args.ranks)) or min(args.ranks) < 2:
        parser.error(f"--ranks must be ascending, from 2 on, not {args.ranks}")
    require_marks(parser, args.markdown, MARKS)
    return args


def measure(ranks: int) -> Costs:
    """Return the costs of a world, for each the rank that has the most of it."""
    BUILD.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        every = run_ranks(costs_on_rank, folder, free_port(), nproc=ranks)
    for name, lazy in ((OPEN, "0"), (LAZY, "1")):
        with patch.dict(os.environ, {LAZY_INIT: lazy}):
            openings = run_ranks(cost_of_opening, nproc=ranks)
        for own, opening in zip(every, openings, strict=True):
            own.each[name] = opening
    most = {n: Cost(*map(max, zip(*(own.each[n] for own in every), strict=True))) for n in NAMES}
    return Costs(ranks, most, *map(max, zip(*(own[2:] for own in every), strict=True)))


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def costs_on_rank(folder: str, port: int) -> Costs:
    """Measure this rank's costs."""
    torch.set_num_threads(1)
    info = open_groups(port)
    saved, small = handler_of(WIDTH, WIDTH), handler_of(1, FEATURES)
    data, sums = (
        TensorDataset(torch.zeros(ITEMS, 1)),
        RunningSums({}, info.device, distributed=True),
    )
    path = Path(folder) / "checkpoint.pt"
    works: dict[str, Callable[[], object]] = {
        BARRIER: dist.barrier,
        ON_RANK: on_rank(0)(int),
        SHARED: on_rank(0, broadcast=True)(int),
        REDUCE: lambda: reduce_sum({"x": 1.0}),
        GATHER: lambda: gather_objects(b"x" * 100),
        SUMMARY: sums.means,
        PREDICT: lambda: small.predict(data, batch_size=ITEMS // info.world_size),
        SAVE: lambda: saved.save(path),
        LOAD: lambda: saved.load(path),
    }
    each = {}
    for name, work in works.items():
        rounds = []
        for _ in range(1 + ROUNDS):
            dist.barrier()
            rounds.append(cost(work, calls=1 if name in (PREDICT, SAVE, LOAD) else CALLS))
        each[name] = medians(rounds[1:])
    process = psutil.Process()
    memory = process.memory_full_info().uss / 2**20
    return Costs(info.world_size, each, memory, len(process.net_connections()))


def handler_of(inputs: int, outputs: int) -> Handler:
    model = nn.Linear(inputs, outputs, bias=False)
    return Handler(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)


def cost_of_opening() -> Cost:
    """Open and close the groups several times; return what the opening costs on this rank.

    A call of on_rank belongs to it, because lazy connections are made only then.
    """
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    meeting_point = dist.TCPStore(*master, wait_for_workers=False)  # that of run_ranks
    rounds = []
    for number in range(1 + ROUNDS):
        port = meet(meeting_point, f"round {number}")
        rounds.append(cost(partial(open_and_call, port)))
        cleanup_ddp()
    return medians(rounds[1:])


def open_and_call(port: int) -> None:
    open_groups(port)
    on_rank(0)(int)()


def meet(store: dist.Store, name: str) -> int:
    """Wait until all ranks are here, without a group; return a free port, the same on all."""
    if store.add(f"{name}, arrived", 1) == int(os.environ["WORLD_SIZE"]):
        store.set(name, str(free_port()))
    return int(store.get(name))


def open_groups(port: int) -> DistInfo:
    """Open the groups with a store on rank 0; that of run_ranks is in the parent process."""
    return initialize_ddp(master_addr=HOST, master_port=port)


def cost(work: Callable[[], object], calls: int = 1) -> Cost:
    elapsed, cpu = perf_counter(), process_time()
    for _ in range(calls):
        work()
    return Cost((perf_counter() - elapsed) / calls, (process_time() - cpu) / calls)


def medians(rounds: Sequence[Cost]) -> Cost:
    return Cost(*map(median, zip(*rounds, strict=True)))


def tables(worlds: Sequence[Costs]) -> str:
    """Return in Markdown what the busiest rank does, and how long all ranks take together."""
    head = [*(f"{world.ranks} ranks" for world in worlds), "exponent"]
    busiest = [
        ["CPU time of the busiest rank", *head, *(f"{ranks:,} ranks" for ranks in PREDICTED)]
    ]
    together = [["time, all ranks on these cores", *head]]
    for name in NAMES:
        cpu = [world.each[name].cpu for world in worlds]
        later = [
            duration(cpu_at(n, name, worlds), digits=2) if name in POWERS else "" for n in PREDICTED
        ]
        busiest.append([name, *map(duration, cpu), exponent(worlds, cpu), *later])
        elapsed = [world.each[name].elapsed for world in worlds]
        together.append([name, *map(duration, elapsed), exponent(worlds, elapsed)])
    memory = [world.memory for world in worlds]
    busiest.append(
        ["memory", *(f"{mib:.0f} MiB" for mib in memory), exponent(worlds, memory), "", ""]
    )
    sockets = [world.sockets for world in worlds]
    later = [f"{sockets_at(ranks):,}" for ranks in PREDICTED]
    busiest.append(["sockets", *map(str, sockets), exponent(worlds, sockets), *later])
    return f"{grid(busiest)}\n\n{grid(together)}"


def exponent(worlds: Sequence[Costs], values: Sequence[float]) -> str:
    """Return the power of the number of ranks with which the values grow: 1 is linear."""
    if len(worlds) < 2:
        return ""
    first = max(len(worlds) - 3, 0)  # two neighbors would show the noise
    return f"{math.log(values[-1] / values[first], worlds[-1].ranks / worlds[first].ranks):.1f}"


def cpu_at(ranks: int, name: str, worlds: Sequence[Costs]) -> float:
    """Return the busiest rank's CPU time in a world that is too large to measure here."""
    return worlds[-1].each[name].cpu * (ranks / worlds[-1].ranks) ** POWERS[name]


def sockets_at(ranks: int) -> int:
    """Return the sockets of rank 0.

    It has one to each other rank in the group, and as host of the store one more. The store
    listens on one, and two connect rank 0 itself with it. The group's device listens on one.
    """
    return 2 * (ranks - 1) + 4


def image(worlds: Sequence[Costs]) -> str:
    measured = f"measured up to {worlds[-1].ranks} ranks and predicted up to {PREDICTED[-1]:,}"
    text = f"CPU time of the busiest rank by number of ranks, {measured}. The table has the numbers"
    return f"![{text}.]({FIGURE.as_posix()})"


def draw(worlds: Sequence[Costs], path: Path) -> None:
    """Draw the CPU time of the busiest rank: measured with dots, predicted with dashes."""
    from matplotlib.figure import Figure  # not above: the ranks load this module

    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(POWERS):
        measured = [world.each[name].cpu for world in worlds]
        axes.plot([world.ranks for world in worlds], measured, "o-", color=f"C{number}", label=name)
        sizes = worlds[-1].ranks, *PREDICTED
        axes.plot(sizes, [cpu_at(n, name, worlds) for n in sizes], "--", color=f"C{number}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    ticks = {"1 ms": 1e-3, "10 ms": 1e-2, "0.1 s": 0.1, "1 s": 1, "1 min": 60, "1 h": 3600}
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.set_xlabel("ranks")
    axes.set_title("CPU time of the busiest rank for one call", fontsize="medium", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
