"""Time a training step on GPUs: `Handler` and char_gpt.py against loops written by hand.

Runs on one GPU, then on all of them with one rank each. In the small step, launching the kernels
takes longer than running them, so its ratio is the worst case for `Handler`. The benchmark fails
unless all loops end with the same weights, up to rounding: GPU kernels may add in any order. For
char_gpt.py that is checked after 40 steps, because small differences grow from step to step.
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
    ((card, gpus),) = run_ranks(gpus_here, nproc=1)  # in a process of its own
    if not gpus:
        print("left out: no CUDA device is visible")
        return []
    return [table for ranks in sorted({1, gpus}) for table in on_gpus(rounds, ranks, card)]


def on_gpus(rounds: int, ranks: int, card: str) -> list[Table]:
    device, title = ("cuda", "nccl"), f"{ranks} GPU{'s' * (ranks > 1)}"
    times = run_ranks(steps.times_on_rank, WIDTH, rounds, NAMES, *device, nproc=ranks)[0]
    rows = compare(times, steps.RAW)
    small = Table(f"a step of five layers, {title}", rows, [steps.against_raw(rows), card])
    run_ranks(finale.times_on_rank, 1, *device, nproc=ranks)  # the weights, after 40 steps
    times = run_ranks(finale.times_on_rank, rounds, *device, check=False, nproc=ranks)[0]
    rows = compare(times, steps.RAW)
    speeds = finale.speeds(rows, ranks * finale.BATCH["cuda"])
    return [small, Table(f"a step of char_gpt.py, {title}", rows, [*speeds, card])]


def gpus_here() -> tuple[str, int]:
    count = torch.cuda.device_count()
    return (f"on {count} x {torch.cuda.get_device_name()}" if count else ""), count
