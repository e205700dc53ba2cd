"""Which ranks read each item in an epoch: one read is right, everything else has a pattern."""

from collections.abc import Iterator, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch.utils.data import get_worker_info

from .palette import HATCHES, RANKS

Readers = dict[str, list[list[int]]]  # by case, for each item: the rank of each read


def by_both(items: Sequence[int], rank: int, world_size: int) -> Iterator[int]:
    """Return the items that this worker of this rank must yield (chapter 09's exercise)."""
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    shard, shards = rank * workers + worker, world_size * workers
    return (item for number, item in enumerate(items) if number % shards == shard)


def who_read(ranks: Sequence[Mapping[str, Sequence[int]]], items: int) -> Readers:
    """Return, by case, the ranks that read each item, from what each rank read in that case."""
    readers: Readers = {name: [[] for _ in range(items)] for name in ranks[0]}
    for rank, reads in enumerate(ranks):
        for name, read in reads.items():
            for item in read:
                readers[name][item].append(rank)
    return readers


def draw_census(readers: Readers) -> Figure:
    """Draw a row of boxes for each case: a box for each item, with a stripe for each read."""
    items = len(next(iter(readers.values())))
    figure, axes = plt.subplots(figsize=(7.5, 0.6 * len(readers) + 1.1))
    for row, boxes in enumerate(readers.values()):
        for item, ranks in enumerate(boxes):
            _draw_box(axes, item, row, ranks)
    axes.set(xlim=(-0.5, items - 0.5), ylim=(len(readers) - 0.5, -0.5), xlabel="item")
    axes.set_xticks(range(items))
    axes.set_yticks(range(len(readers)), list(readers))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    keys = [
        Patch(facecolor=RANKS[rank], hatch=HATCHES[rank], edgecolor="white", label=f"rank {rank}")
        for rank in sorted({rank for boxes in readers.values() for box in boxes for rank in box})
    ]
    axes.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(1, 1), frameon=False, title="read by"
    )
    return figure


def _draw_box(axes: Axes, item: int, row: int, ranks: Sequence[int]) -> None:
    """Draw one item: as many stripes as it was read, and that number."""
    width = 0.9 / max(1, len(ranks))
    for place, rank in enumerate(ranks):
        corner = (item - 0.45 + place * width, row - 0.4)
        look: dict = {"facecolor": RANKS[rank], "hatch": HATCHES[rank], "edgecolor": "white"}
        axes.add_patch(Rectangle(corner, width, 0.8, **look))
    label = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(item, row, str(len(ranks)), ha="center", va="center", fontweight="bold", bbox=label)
