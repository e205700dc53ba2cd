"""How fast ranks train and load: measured, and drawn as ratios."""

import os
import time
import warnings
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from .timing import fastest

BATCH = 64
WAYS = [  # how to use the cores, with the color and the hatch of its bars
    ("1 process, all cores", "tab:blue", ""),
    ("2 ranks, half the cores each", "tab:orange", "//"),
    ("2 ranks, all cores each", "lightgray", "xx"),
]


class Items(Dataset[int]):
    """Items that cost `work` turns of a loop each; each is the id of the process that made it."""

    def __init__(self, work: int) -> None:
        self.work = work

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> int:
        for _ in range(self.work):
            pass
        return os.getpid()


def training_speeds(widths: Sequence[int], threads: Sequence[int]) -> list[list[float]]:
    """Return samples a second of all ranks together, for each width a list over `threads`.

    Collective: all ranks call it.
    """
    ranks, found = int(os.environ["WORLD_SIZE"]), []
    if ranks > 1:
        dist.init_process_group("gloo")
    for width in widths:
        layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        model = DDP(layers) if ranks > 1 else layers
        found.append([ranks * _samples_per_second(model, width, number) for number in threads])
    return found


def _samples_per_second(model: nn.Module, width: int, threads: int) -> float:
    """Return how many samples of `width` numbers a second this process trains on, at best."""
    torch.set_num_threads(threads)
    inputs = torch.rand(BATCH, width)  # (batch, features)

    def step() -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()

    return BATCH / fastest(step, 10, together=3)


def loading_speeds(
    works: Sequence[int], workers: Sequence[int]
) -> list[list[tuple[float, set[int]]]]:
    """Return items a second of this rank, and who made them, by work and number of workers."""
    return [[_items_per_second(work, number) for number in workers] for work in works]


def _items_per_second(work: int, num_workers: int) -> tuple[float, set[int]]:
    """Return how many items a second a new loader gives, from its start on, and who made them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of too many workers: it counts one rank's
        loader = DataLoader(Items(work), batch_size=8, num_workers=num_workers)
        begin = time.perf_counter()
        items = torch.cat(list(loader))
    return len(items) / (time.perf_counter() - begin), set(items.tolist())


def draw_slowness(
    training: Mapping[str, Sequence[float]],
    loading: Mapping[str, Sequence[tuple[float, object]]],
    workers: Sequence[int],
) -> Figure:
    """Draw training speeds (model -> samples/s for each of WAYS) beside loading speeds.

    Training is drawn relative to the first way of each model, loading (kind of item -> what
    `loading_speeds` gave for each of `workers`) relative to its first value.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    width = 0.8 / len(WAYS)
    for number, (way, color, hatch) in enumerate(WAYS):
        places = [model + (number - 1) * width for model in range(len(training))]
        ratios = [speeds[number] / speeds[0] for speeds in training.values()]
        bars = left.bar(places, ratios, width, color=color, hatch=hatch, ec="white", label=way)
        left.bar_label(bars, fmt="%.2f", fontsize=8)
    left.set_xticks(range(len(training)), list(training))
    left.set_ylabel("samples/s, relative to one process")
    left.margins(y=0.35)  # room for the legend
    left.legend(fontsize=8, frameon=False, loc="upper left")
    for (kind, speeds), marker in zip(loading.items(), "os", strict=True):
        ratios = [speed / speeds[0][0] for speed, _ in speeds]
        right.plot(range(len(workers)), ratios, marker=marker, label=kind)
    right.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    right.set_xticks(range(len(workers)), [str(number) for number in workers])
    right.set_xlabel("num_workers a rank, 2 ranks")
    right.set_ylabel("items/s, relative to no worker")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8, frameon=False)
    return figure
