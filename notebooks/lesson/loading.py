"""How fast a rank gets its items from a DataLoader, by the kind of item and the workers."""

import os
import time
import warnings
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, Dataset

from ddp_ref import run_ranks

from .palette import LOAD, REFERENCE

KINDS = ("cheap", "computes", "waits")


class Items(Dataset[int]):
    """256 items; each is the id of the process that made it.

    An item is "cheap", or it "computes" for some milliseconds, or it "waits" for 12, as one does
    that comes from a disk or over a network.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> int:
        if self.kind == "waits":
            time.sleep(0.012)
        if self.kind == "computes":
            for _ in range(60_000):
                pass
        return os.getpid()


def items_per_second(kind: str, num_workers: int) -> tuple[float, set[int]]:
    """Return how many items a second a new loader gives, its start included, and who made them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of more workers than cores: it is the point
        loader = DataLoader(Items(kind), batch_size=8, num_workers=num_workers)
        begin = time.perf_counter()
        items = torch.cat(list(loader))
    return len(items) / (time.perf_counter() - begin), set(items.tolist())


def measure_loading(workers: Sequence[int]) -> tuple[dict[str, list[float]], list[int]]:
    """Load every kind of item on two ranks, with each of these numbers of workers per rank.

    Returns:
        Rank 0's items per second, by kind and number of workers, and by number of workers how many
        processes made the cheap items of both ranks.
    """
    ranks = run_ranks(_load_all, list(workers))
    speeds = {kind: [speed for speed, _ in cases] for kind, cases in ranks[0].items()}
    makers = [[pids for _, pids in cases["cheap"]] for cases in ranks]  # by rank and workers
    return speeds, [len(one | other) for one, other in zip(*makers, strict=True)]


def _load_all(workers: list[int]) -> dict[str, list[tuple[float, set[int]]]]:
    return {kind: [items_per_second(kind, number) for number in workers] for kind in KINDS}


def draw_loading(speeds: Mapping[str, Sequence[float]], workers: Sequence[int]) -> Figure:
    """Draw items a second by the number of workers, relative to none, for each kind of item."""
    figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
    for (kind, values), marker in zip(speeds.items(), "os^", strict=True):
        ratios = [value / values[0] for value in values]
        (line,) = axes.plot(range(len(workers)), ratios, marker=marker, color=REFERENCE, label=kind)
        line.set(markerfacecolor=LOAD, markersize=10)
    axes.axhline(1, color=REFERENCE, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(workers)), [str(number) for number in workers])
    axes.set(xlabel="num_workers of each of 2 ranks", ylabel="items/s, relative to no worker")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False)
    return figure
