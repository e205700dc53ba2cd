"""Time a training step on GPUs: `Handler` against loops written by hand.

Runs on one GPU, then on all of them with one rank each. In the small step, launching the kernels
takes longer than running them, so its ratio is the worst case for `Handler`. The small GPT is that
of `finale`, in bfloat16. On one GPU, it also gets the size of GPT-2 124M, with 32 rows of 1,024
tokens in a step. With little memory the batch is smaller, and if there is too little even for that,
so is the model.

The benchmark fails unless the small loops end with the same weights, bit for bit. The usual GPU
kernels may add in any order, so even the same loop differs from itself. That is why a separate run
with deterministic kernels compares the weights. The timed runs use the usual kernels and compare
none.
"""

import os

import finale
import steps
import torch
from finale import Size
from side_by_side import compare
from tables import Table, duration, goal

from ddp_ref import run_ranks

ROUNDS = 200
WIDTH = 1024
SMALL = Size(batch=64)
MOST_ADDED = 0.2e-3  # seconds that `Handler` may add to the small step
GPT2 = Size(batch=32, length=1024, vocabulary=50304, layers=12, heads=12, width=768)
TINY = Size(batch=4, length=32, vocabulary=512, layers=1, heads=2, width=32)
# GPT-2's models with their optimizers need 8 GiB, and each row of the batch 0.8 GiB.
FIXED_MEMORY, MEMORY_PER_ROW = 12 * 2**30, 2**30


def measure(rounds: int) -> list[Table]:
    ((card, gpus, memory),) = run_ranks(gpus_here, nproc=1)  # in a process of its own
    if not gpus:
        print("left out: no CUDA device is visible")
        return []
    tables, worlds = [], sorted({1, gpus})
    part = -(-rounds // len(worlds))
    for ranks in worlds:
        title = f"{ranks} GPU{'s' * (ranks > 1)}"
        run_ranks(check_on_rank, nproc=ranks)
        times = run_ranks(steps.times_on_rank, WIDTH, part, "cuda", False, nproc=ranks)[0]
        notes = [added(times), card]
        tables.append(Table(f"a step of five layers, {title}", compare(times), notes))
        tables.append(gpt(SMALL, part, ranks, f"char_gpt.py, {title}"))
    rows = min(GPT2.batch, (memory - FIXED_MEMORY) // MEMORY_PER_ROW)
    size = GPT2._replace(batch=rows) if rows >= 8 else TINY
    name = "a tiny GPT" if size == TINY else "GPT-2's size"
    # Fewer rounds, because a step takes 30 times as long as a small one.
    return [*tables, gpt(size, rounds // 10 or 1, 1, f"{name}, 1 GPU")]


def gpus_here() -> tuple[str, int, int]:
    """Return the name of the card, how many there are, and the free bytes of the first."""
    if not (count := torch.cuda.device_count()):
        return "", 0, 0
    return f"on {count} x {torch.cuda.get_device_name()}", count, torch.cuda.mem_get_info()[0]


def added(times: steps.Times) -> str:
    """Return the goal about the time that `Handler` adds to a raw loop with the same lookup."""
    base, ours = compare({name: times[name] for name in (steps.AT_ONCE, steps.OURS)})
    reached = ours.at_most(1 + MOST_ADDED / base.seconds)
    target = f"at most {duration(MOST_ADDED)} added to '{base.name}'"
    return goal(target, steps.added_time(times, steps.AT_ONCE, [steps.OURS]), reached)


def check_on_rank() -> None:
    """Train 40 steps with deterministic kernels; raise unless all loops end with equal weights."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when CUDA starts
    torch.use_deterministic_algorithms(True)
    steps.times_on_rank(WIDTH, 1, "cuda")
    finale.times_on_rank(SMALL, 1, "cuda")
    assert torch.are_deterministic_algorithms_enabled(), "a library has turned them off"


def gpt(size: Size, rounds: int, ranks: int, title: str) -> Table:
    """Measure the GPT in this size, and how many tokens a second each loop trains on."""
    rows = compare(run_ranks(finale.times_on_rank, size, rounds, "cuda", False, nproc=ranks)[0])
    tokens = ranks * size.batch * size.length
    speeds = ((row.name, tokens / rows[0].seconds / row.ratio) for row in rows)
    notes = [f"{name}: {round(speed, -2):,.0f} tokens a second" for name, speed in speeds]
    batch = f"{size.batch} x {size.length:,} tokens, {size.layers} layers, {size.width} wide"
    return Table(f"a step of {title}", rows, [*notes, f"on each GPU {batch}"])
