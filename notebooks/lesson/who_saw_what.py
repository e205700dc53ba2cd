"""Which rank saw which sample, epoch by epoch."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from .palette import RANKS

Epoch = list[list[int]]  # of each rank: the samples it drew, in order


def draw_who_saw_what(cases: dict[str, list[Epoch]]) -> Figure:
    """Draw one panel per case: a row per epoch, a column per sample, and which rank drew it."""
    figure, panels = plt.subplots(1, len(cases), figsize=(8, 2.7), squeeze=False)
    for axes, (title, epochs) in zip(panels[0], cases.items(), strict=True):
        for row, epoch in enumerate(epochs):
            _draw_epoch(axes, row, epoch)
        samples = 1 + max(max(drawn) for drawn in epochs[0])
        axes.set(title=title, xlabel="sample", xlim=(-0.5, samples - 0.5))
        axes.set(xticks=range(samples), yticks=range(len(epochs)))
        axes.set_ylim(len(epochs) - 0.5, -0.5)
    panels[0][0].set_ylabel("epoch")
    ranks = len(next(iter(cases.values()))[0])
    keys = [Patch(fc=RANKS[rank], ec="black", label=f"rank {rank}") for rank in range(ranks)]
    keys.append(Patch(fc="white", ec="black", hatch="////", label="padding: drawn again"))
    figure.legend(handles=keys, loc="lower center", ncols=len(keys), bbox_to_anchor=(0.5, -0.12))
    figure.tight_layout()
    return figure


def _draw_epoch(axes: Axes, row: int, epoch: Epoch) -> None:
    """Draw each sample's square; one that is drawn again shares it between both ranks."""
    seen: dict[int, list[int]] = {}  # the ranks of a sample, the first to draw it first
    for step in zip(*epoch, strict=True):
        for rank, sample in enumerate(step):
            seen.setdefault(sample, []).append(rank)
    for sample, ranks in seen.items():
        width = 1 / len(ranks)
        for place, rank in enumerate(ranks):
            left = sample - 0.5 + place * width
            hatch = "////" if place else None
            corner = (left, row - 0.5)
            axes.add_patch(Rectangle(corner, width, 1, fc=RANKS[rank], ec="black", hatch=hatch))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            axes.text(left + width / 2, row, str(rank), ha="center", va="center", bbox=box)
