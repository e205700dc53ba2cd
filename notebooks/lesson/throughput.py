"""Two ranks that train together, beside two processes that train each for itself."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import run_ranks

from .each import for_each
from .palette import COMMUNICATE, COMPUTE


def time_steps(model: nn.Module, inputs: Tensor, steps: int) -> float:
    """Return the seconds that this process takes for some steps of forward and backward."""
    start = time.perf_counter()
    for _ in range(steps):
        model.zero_grad()
        model(inputs).square().mean().backward()
    return time.perf_counter() - start


# What makes the model, the shape of its inputs on each rank, and how many steps a round has.
Case = tuple[Callable[[], nn.Module], tuple[int, ...], int]


def throughput_ratios(cases: Mapping[str, Case]) -> dict[str, list[float]]:
    """Return DDP's throughput relative to that of two independent processes.

    Args:
        cases: By name: a function that makes the model, the shape of the inputs, and the number of
            steps in a round.

    Returns:
        By name, the ratio in each of twelve rounds on rank 0.
    """
    results = run_ranks(for_each, _time_rounds, *cases.values())[0]
    return {
        name: [independent / ddp for independent, ddp in rounds]
        for name, rounds in zip(cases, results, strict=True)
    }


def _time_rounds(case: Case) -> list[list[float]]:
    """Return the seconds of some steps, round by round: (independent processes, DDP)."""
    make_model, shape, steps = case
    models = make_model(), DDP(make_model())
    inputs = torch.randn(shape)
    rounds: list[list[float]] = []
    for _ in range(13):
        rounds.append([])
        for model in models:
            dist.barrier()  # in both cases, both ranks compute at the same time
            rounds[-1].append(time_steps(model, inputs, steps))
    return rounds[1:]  # in the first, DDP arranges its buckets


def draw_throughput(kept: Mapping[str, Sequence[float]]) -> Figure:
    """Draw for each model the throughput of DDP, relative to that of independent processes.

    Args:
        kept: The ratio in each round, by model. A bar is their median, a line spans all rounds.
    """
    medians = {name: median(rounds) for name, rounds in kept.items()}
    below = [medians[name] - min(rounds) for name, rounds in kept.items()]
    above = [max(rounds) - medians[name] for name, rounds in kept.items()]
    figure, axes = plt.subplots(figsize=(7, 0.7 * len(kept) + 1.1), layout="constrained")
    places = range(len(kept))
    axes.barh([p - 0.2 for p in places], 1, 0.38, color=COMPUTE, label="2 independent processes")
    bars = axes.barh(
        [p + 0.2 for p in places],
        list(medians.values()),
        0.38,
        xerr=(below, above),
        capsize=3,
        color=COMMUNICATE,
        hatch="//",
        edgecolor="white",
        label="2 ranks of DDP",
    )
    axes.bar_label(bars, fmt="median %.2f", padding=3)
    axes.set_yticks(places, list(kept))
    axes.invert_yaxis()
    longest = max(1.0, *(max(rounds) for rounds in kept.values()))
    axes.set_xlim(0, 1.35 * longest)  # with room for the label after the longest line
    axes.set_xlabel("samples per second, relative to independent processes")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure
