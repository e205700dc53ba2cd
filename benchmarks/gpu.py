"""The same on a GPU: a step of `Handler` and of the finale against raw DDP.

A world of one under nccl, and two ranks that share one GPU through gloo, which nccl refuses.
"""

import finale
import steps
import torch
from side_by_side import AGAIN, compare
from tables import Table

from ddp_ref import run_ranks

ROUNDS = 200
WIDTH = 1024
NAMES = (steps.RAW, steps.RAW + AGAIN, steps.OURS)
GROUPS = {"nccl, one rank": ("nccl", 1), "gloo, two ranks on one GPU": ("gloo", 2)}


def measure(rounds: int) -> list[Table]:
    (card,) = run_ranks(gpu_name, nproc=1)  # not here: what this process has seen, it keeps
    if card is None:
        print("left out: no CUDA device is visible")
        return []
    tables = []
    for title, (backend, ranks) in GROUPS.items():
        where = ("cuda", backend)
        times = run_ranks(steps.times_on_rank, WIDTH, rounds, NAMES, *where, nproc=ranks)[0]
        rows = compare(times, steps.RAW)
        tables.append(Table(f"a step, {title}", rows, [*steps.against_raw(rows), f"on {card}"]))
        rows = compare(run_ranks(finale.times_on_rank, rounds, *where, nproc=ranks)[0], steps.RAW)
        batch = ranks * finale.BATCH["cuda"]
        tables.append(
            Table(f"the finale, {title}", rows, [*finale.speeds(rows, batch), f"on {card}"])
        )
    return tables


def gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
