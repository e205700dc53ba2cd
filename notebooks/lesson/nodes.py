"""Ranks on nodes: what the launcher told each rank, and which device the rank takes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .palette import RANKS, REFERENCE


@dataclass(frozen=True)
class RankInfo:
    """What a launcher told one rank."""

    rank: int
    local_rank: int
    node: int
    devices: tuple[str, ...]  # the GPUs that the rank sees, in the order of their index


LINE = re.compile(r"rank (\d+) \| local rank (\d+) \| node (\d+) \| sees GPU ([\d,]+)")
Rule = Callable[[RankInfo], int]  # returns the index of the device that a rank takes


def parse_ranks(text: str) -> list[RankInfo]:
    """Return what the ranks printed with who.py, in rank order."""
    ranks = [
        RankInfo(int(rank), int(local_rank), int(node), tuple(devices.split(",")))
        for rank, local_rank, node, devices in LINE.findall(text)
    ]
    return sorted(ranks, key=lambda info: info.rank)


def pick_device(info: RankInfo, index: int) -> str:
    """Return the device at that index, or the error if the rank sees no device there."""
    try:
        return f"GPU {info.devices[index]}"
    except IndexError as error:
        return f"IndexError: {error}"


def draw_devices(ranks: Sequence[RankInfo], rules: dict[str, Rule]) -> Figure:
    """Draw the devices that each rank sees, and under each of `rules`, the device that it takes."""
    figure, panels = plt.subplots(
        1, len(rules), figsize=(7.5, 3.2), sharey=True, sharex=True, layout="constrained"
    )
    for panel, (title, rule) in zip(panels, rules.items(), strict=True):
        for row, info in enumerate(ranks):
            for index, name in enumerate(info.devices):
                panel.text(index, row - 0.38, f"GPU {name}", ha="center", va="center", fontsize=8)
                look: dict = {"markersize": 21, "markerfacecolor": "white", "zorder": 1}
                panel.plot(index, row, "s", markeredgecolor=REFERENCE, **look)
            index = rule(info)
            mark = "o" if index < len(info.devices) else "X"
            panel.plot(index, row, mark, markersize=12, color=RANKS[info.rank], zorder=2)
        panel.set(title=title, xlabel="device index", xticks=range(4), xlim=(-0.6, 3.6))
        panel.spines[["top", "right"]].set_visible(False)
    names = [f"rank {info.rank}: node {info.node}, local rank {info.local_rank}" for info in ranks]
    panels[0].set(yticks=range(len(ranks)), yticklabels=names, ylim=(len(ranks) - 0.4, -0.7))
    return figure
