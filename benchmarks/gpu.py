"""Time a training step on GPUs: `Handler` and char_gpt.py against loops written by hand.

Runs on one GPU, then on all of them with one rank each. In the small step, launching the kernels
takes longer than running them, so its ratio is the worst case for `Handler`. The peers of `steps`
take part if they are installed. accelerate and ignite do not wrap a single process in DDP, so on
one GPU they would do less work than the others, and are left out.

The benchmark fails unless all loops end with the same weights, bit for bit. The usual GPU kernels
may add in any order, so even the same loop differs from itself. That is why a separate run with
deterministic kernels compares the weights. The timed run uses the usual kernels and compares none.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import finale
import steps
import torch
from side_by_side import Row, compare, find
from tables import Table, duration, goal

from ddp_ref import run_ranks

ROUNDS = 200
WIDTH = 1024
MOST_ADDED = 0.2e-3  # seconds that `Handler` may add to the small step
PACKAGES = {
    steps.ACCELERATE: "accelerate",
    steps.FABRIC: "lightning",
    steps.FABRIC_AT_ONCE: "lightning",
    steps.TRAINER: "lightning",
    steps.IGNITE: "ignite",
}
WITHOUT_DDP = {steps.ACCELERATE, steps.IGNITE}  # when there is a single process
Times = dict[str, list[float]]


def measure(rounds: int) -> list[Table]:
    ((card, gpus),) = run_ranks(gpus_here, nproc=1)  # in a process of its own
    if not gpus:
        print("left out: no CUDA device is visible")
        return []
    worlds = sorted({1, gpus})
    part = -(-rounds // len(worlds))
    return [table for ranks in worlds for table in on_gpus(part, ranks, card)]


def on_gpus(rounds: int, ranks: int, card: str) -> list[Table]:
    title, absent = f"{ranks} GPU{'s' * (ranks > 1)}", left_out(ranks)
    names = [name for name in steps.LOOPS if name not in absent]
    run_ranks(check_on_rank, names, nproc=ranks)
    small, char_gpt = run_ranks(times_on_rank, names, rounds, nproc=ranks)[0]
    notes = [added(small), *(f"{name} is left out: {why}." for name, why in absent.items()), card]
    rows = compare(char_gpt, steps.RAW)
    return [
        Table(f"a step of five layers, {title}", compare(small, steps.RAW), notes),
        Table(f"a step of char_gpt.py, {title}", rows, [*speeds(rows, ranks), card]),
    ]


def speeds(rows: Sequence[Row], ranks: int) -> list[str]:
    """Return how many characters a second each loop trains on."""
    characters = ranks * finale.BATCH["cuda"] * finale.BLOCK
    base = characters / find(rows, steps.RAW).seconds
    return [f"{row.name}: {round(base / row.ratio, -2):,.0f} characters a second" for row in rows]


def left_out(ranks: int) -> dict[str, str]:
    """Return which loops cannot be measured here, and why."""
    absent = {}
    for name, package in PACKAGES.items():
        if find_spec(package) is None:
            absent[name] = f"{package} is not installed"
        elif ranks == 1 and name in WITHOUT_DDP:
            absent[name] = "it does not wrap a single process in DDP"
    return absent


def added(times: Mapping[str, list[float]]) -> str:
    """Return the goal about the time that `Handler` adds to a raw loop with the same lookup."""
    both = {name: times[name] for name in (steps.AT_ONCE, steps.OURS)}
    base, ours = compare(both, steps.AT_ONCE)
    target = f"Handler adds at most {duration(MOST_ADDED)} to '{base.name}'"
    reached = ours.at_most(1 + MOST_ADDED / base.seconds)
    return goal(target, steps.added_time(ours, base.seconds), reached)


def check_on_rank(names: Sequence[str]) -> None:
    """Train 40 steps with deterministic kernels; raise unless all loops end with equal weights."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when CUDA starts
    torch.use_deterministic_algorithms(True)
    times_on_rank(names, 1, check=True)
    assert torch.are_deterministic_algorithms_enabled(), "a library has turned them off"


def times_on_rank(names: Sequence[str], rounds: int, check: bool = False) -> tuple[Times, Times]:
    """Return the seconds of a small step, and of one of char_gpt.py, by loop and round."""
    small = steps.times_on_rank(WIDTH, rounds, names, "cuda", check)
    return small, finale.times_on_rank(rounds, "cuda", check)


def gpus_here() -> tuple[str, int]:
    count = torch.cuda.device_count()
    return (f"on {count} x {torch.cuda.get_device_name()}" if count else ""), count
