"""How the cost of each operation grows with the number of ranks.

python benchmarks/growth.py                                   2 to 64 ranks, on the terminal
python benchmarks/growth.py --ranks 2 8

All ranks run on this machine and share its cores. On a cluster each rank has cores of its own, so
this measures the CPU time of the busiest rank, and the sockets of the rank that has the most.
"""

import math
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from page import BUILD, ROOT, machine
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

sys.path.append(str(ROOT / "tests"))
from harness import free_port

RANKS = 2, 16, 64
PREDICTED = 1_000
ROUNDS, CALLS = 5, 10
HOST = "127.0.0.1"
ITEMS, FEATURES = 4096, 1024  # of predict's output: 16 MiB
WIDTH = 2048  # of a linear layer: a checkpoint of 16 MiB
OPEN = "open the group and call on_rank"
LAZY = f"{OPEN}, TORCH_GLOO_LAZY_INIT=1"
SOCKETS = "sockets"
Costs = dict[str, float]  # by name: seconds of CPU time, the median of the rounds; or sockets


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers, ascending")
    args = parser.parse_args()
    worlds = {}
    for ranks in args.ranks:
        worlds[ranks] = measure(ranks)
        print(f"{ranks} ranks: done", flush=True)
    print(f"\non {machine(['torch'])}\n\n{table(worlds)}")


def measure(ranks: int) -> Costs:
    """Return the costs of a world, for each the rank that has the most of it."""
    BUILD.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        every = run_ranks(costs_on_rank, folder, free_port(), nproc=ranks)
    most: Costs = {}
    for name, lazy in ((OPEN, "0"), (LAZY, "1")):
        with patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": lazy}):
            most[name] = max(run_ranks(cost_of_opening, nproc=ranks))
    return most | {name: max(own[name] for own in every) for name in every[0]}


def costs_on_rank(folder: str, port: int) -> Costs:
    """Measure this rank's costs."""
    torch.set_num_threads(1)
    info = open_group(port)
    saved, small = handler_of(WIDTH, WIDTH), handler_of(1, FEATURES)
    data = TensorDataset(torch.zeros(ITEMS, 1))
    path = Path(folder) / "checkpoint.pt"
    works: dict[str, tuple[int, Callable[[], object]]] = {  # and how many calls to time at once
        "on_rank": (CALLS, on_rank(0)(int)),
        "reduce_sum of one number": (CALLS, lambda: reduce_sum({"x": 1.0})),
        "gather_objects, 100 bytes each": (CALLS, lambda: gather_objects(b"x" * 100)),
        "Handler's exchange, every ten steps": (CALLS, small._sync),
        "predict, 16 MiB in all": (1, lambda: small.predict(data, ITEMS // info.world_size)),
        "save, 16 MiB": (1, lambda: saved.save(path)),
        "load, 16 MiB": (1, lambda: saved.load(path)),
    }
    costs: Costs = {}
    for name, (calls, work) in works.items():
        rounds = []
        for _ in range(1 + ROUNDS):
            dist.barrier()
            rounds.append(cost(work, calls))
        costs[name] = median(rounds[1:])
    costs[SOCKETS] = len(psutil.Process().net_connections())
    dist.barrier()  # a rank that leaves closes its connections to those that still count
    return costs


def handler_of(inputs: int, outputs: int) -> Handler:
    model = nn.Linear(inputs, outputs, bias=False)
    return Handler(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)


def cost_of_opening() -> float:
    """Open and close the group several times; return what the opening costs on this rank.

    A call of on_rank belongs to it, because lazy connections are made only then.
    """
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*master, wait_for_workers=False)  # that of run_ranks
    rounds = []
    for number in range(1 + ROUNDS):
        # Meet without a group, and agree on a free port.
        if store.add(f"round {number}, arrived", 1) == int(os.environ["WORLD_SIZE"]):
            store.set(f"round {number}", str(free_port()))
        port = int(store.get(f"round {number}"))
        rounds.append(cost(partial(open_and_call, port)))
        cleanup_ddp()
    return median(rounds[1:])


def open_and_call(port: int) -> None:
    open_group(port)
    on_rank(0)(int)()


def open_group(port: int) -> DistInfo:
    """Open the group with a store on rank 0; that of run_ranks is in the parent process."""
    return initialize_ddp(master_addr=HOST, master_port=port)


def cost(work: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of CPU time of one call, in all threads of this process."""
    start = process_time()
    for _ in range(calls):
        work()
    return (process_time() - start) / calls


def table(worlds: dict[int, Costs]) -> str:
    """Return in Markdown what the busiest rank does, measured and predicted."""
    head = [*(f"{ranks} ranks" for ranks in worlds), "exponent", f"{PREDICTED:,} ranks"]
    rows = [["CPU time of the busiest rank", *head]]
    *_, before, last = worlds
    for name in worlds[last]:
        values = [costs[name] for costs in worlds.values()]
        # The power of the number of ranks with which the last two values grow: 1 is linear.
        exponent = math.log(values[-1] / values[-2], last / before)
        # Opening the group grows with the square of the number of ranks, and all else linearly.
        later = values[-1] * (PREDICTED / last) ** (2 if name == OPEN else 1)
        if name == SOCKETS:  # rank 0 has 3 N + 2
            cells = [f"{value:,.0f}" for value in (*values, 3 * PREDICTED + 2)]
        else:
            cells = [*map(duration, values), duration(later, digits=2)]
        rows.append([name, *cells[:-1], f"{exponent:.1f}", cells[-1]])
    return grid(rows)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
