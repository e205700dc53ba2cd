"""How the cost of each operation grows with the number of ranks.

python benchmarks/growth.py                                   2 to 64 ranks, on the terminal
python benchmarks/growth.py --ranks 2 8 --markdown docs/growth.md

All ranks run on this machine and share its cores. On a cluster each rank has cores of its own, so
this measures the CPU time of the busiest rank.
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
from time import process_time
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

RANKS = 2, 16, 64
PREDICTED = 1_000
ROUNDS, CALLS = 5, 10
HOST = "127.0.0.1"
ITEMS, FEATURES = 4096, 1024  # of predict's output: 16 MiB
WIDTH = 2048  # of a linear layer: a checkpoint of 16 MiB
LAZY_INIT = "TORCH_GLOO_LAZY_INIT"
OPEN = "open the group and call on_rank"
LAZY = f"{OPEN}, {LAZY_INIT}=1"
ON_RANK = "on_rank"
REDUCE, GATHER = "reduce_sum of one number", "gather_objects, 100 bytes each"
SUMMARY = "Handler's summary, every ten steps"
PREDICT, SAVE, LOAD = "predict, 16 MiB in all", "save, 16 MiB", "load, 16 MiB"
NAMES = OPEN, LAZY, ON_RANK, REDUCE, GATHER, SUMMARY, PREDICT, SAVE, LOAD
MARKS = "<!-- begin of what growth.py has written -->", "<!-- end -->"


class Costs(NamedTuple):
    """What one world costs."""

    ranks: int
    each: dict[str, float]  # seconds of CPU time by operation: the median, on the busiest rank
    sockets: int  # the most that any rank has open


def main() -> None:
    args = parse()
    warn_if_busy()
    worlds = []
    for ranks in args.ranks:
        worlds.append(measure(ranks))
        print(f"{ranks} ranks: done", flush=True)
    print(f"\n{table(worlds)}")
    if args.markdown:
        about = f"`benchmarks/growth.py` on {machine(['torch'])}."
        put_between(args.markdown, *MARKS, f"{table(worlds)}\n\n{about}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="the worlds' sizes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table there too")
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
    most = {name: max(own.each[name] for own in every) for name in NAMES}
    return Costs(ranks, most, max(own.sockets for own in every))


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def costs_on_rank(folder: str, port: int) -> Costs:
    """Measure this rank's costs."""
    torch.set_num_threads(1)
    info = open_groups(port)
    saved, small = handler_of(WIDTH, WIDTH), handler_of(1, FEATURES)
    data = TensorDataset(torch.zeros(ITEMS, 1))
    sums = RunningSums({}, info.device, distributed=True)
    path = Path(folder) / "checkpoint.pt"
    works: dict[str, Callable[[], object]] = {
        ON_RANK: on_rank(0)(int),
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
        each[name] = median(rounds[1:])
    return Costs(info.world_size, each, len(psutil.Process().net_connections()))


def handler_of(inputs: int, outputs: int) -> Handler:
    model = nn.Linear(inputs, outputs, bias=False)
    return Handler(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)


def cost_of_opening() -> float:
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
    return median(rounds[1:])


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


def cost(work: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of CPU time of one call, in all threads of this process."""
    start = process_time()
    for _ in range(calls):
        work()
    return (process_time() - start) / calls


def table(worlds: Sequence[Costs]) -> str:
    """Return in Markdown what the busiest rank does, measured and predicted."""
    head = [*(f"{world.ranks} ranks" for world in worlds), "exponent", f"{PREDICTED:,} ranks"]
    rows = [["CPU time of the busiest rank", *head]]
    for name in NAMES:
        seconds = [world.each[name] for world in worlds]
        later = duration(predicted(name, worlds[-1]), digits=2)
        rows.append([name, *map(duration, seconds), exponent(worlds, seconds), later])
    sockets = [world.sockets for world in worlds]
    later = f"{sockets_at(PREDICTED):,}"
    rows.append(["sockets", *map(str, sockets), exponent(worlds, sockets), later])
    return grid(rows)


def exponent(worlds: Sequence[Costs], values: Sequence[float]) -> str:
    """Return the power of the number of ranks with which the last two values grow: 1 is linear."""
    if len(worlds) < 2:
        return ""
    return f"{math.log(values[-1] / values[-2], worlds[-1].ranks / worlds[-2].ranks):.1f}"


def predicted(name: str, largest: Costs) -> float:
    """Return the busiest rank's CPU time with PREDICTED ranks.

    Opening the group grows with the square of the number of ranks, and all else linearly.
    """
    factor = PREDICTED / largest.ranks
    return largest.each[name] * (factor**2 if name == OPEN else factor)


def sockets_at(ranks: int) -> int:
    """Return the sockets of rank 0.

    It has one to each other rank in the group, and as host of the store one more. The store
    listens on one, and two connect rank 0 itself with it. The group's device listens on one.
    """
    return 2 * (ranks - 1) + 4


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
