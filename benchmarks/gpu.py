"""On GPUs: a step of `Handler`, and one of the finale, against a loop by hand.

Once on one GPU and once on all of them, a rank on each, under nccl. The small step takes less time
than launching its kernels, so its ratio is the most that `Handler` can cost. All ways end with the
same weights but for rounding, or the benchmark fails: kernels may add up in any order.
"""

import finale
import steps
import torch
from side_by_side import AGAIN, compare
from tables import Table

from ddp_ref import run_ranks

ROUNDS = 200
WIDTH = 1024
NAMES = (steps.RAW, steps.RAW + AGAIN, steps.AT_ONCE, steps.OURS)


def measure(rounds: int) -> list[Table]:
    ((card, gpus),) = run_ranks(gpus_here, nproc=1)  # not here: what a process has seen, it keeps
    if not gpus:
        print("left out: no CUDA device is visible")
        return []
    return [table for ranks in sorted({1, gpus}) for table in on_gpus(rounds, ranks, card)]


def on_gpus(rounds: int, ranks: int, card: str) -> list[Table]:
    where, title = ("cuda", "nccl"), f"{ranks} GPU{'s' * (ranks > 1)}"
    times = run_ranks(steps.times_on_rank, WIDTH, rounds, NAMES, *where, nproc=ranks)[0]
    rows = compare(times, steps.RAW)
    small = Table(f"a step of five layers, {title}", rows, [*steps.against_raw(rows), card])
    rows = compare(run_ranks(finale.times_on_rank, rounds, *where, nproc=ranks)[0], steps.RAW)
    speeds = finale.speeds(rows, ranks * finale.BATCH["cuda"])
    return [small, Table(f"a step of the finale, {title}", rows, [*speeds, card])]


def gpus_here() -> tuple[str, int]:
    count = torch.cuda.device_count()
    return (f"on {count} x {torch.cuda.get_device_name()}" if count else ""), count
