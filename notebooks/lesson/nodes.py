"""Ranks on nodes: what the launcher told each rank, and which device it takes by a rule."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .palette import RANKS, REFERENCE


@dataclass(frozen=True)
class Seat:
    """What a launcher told one rank."""

    rank: int
    local_rank: int
    node: int
    devices: tuple[str, ...]  # the GPUs that it sees, in the order of their index


LINE = re.compile(r"rank (\d+) \| local rank (\d+) \| node (\d+) \| sees GPU ([\d,]+)")
Rule = Callable[[Seat], int]  # the index that a rank takes


def read_seats(text: str) -> list[Seat]:
    """Return what the ranks wrote with who.py, in rank order."""
    found = [
        Seat(int(rank), int(local_rank), int(node), tuple(devices.split(",")))
        for rank, local_rank, node, devices in LINE.findall(text)
    ]
    return sorted(found, key=lambda seat: seat.rank)


def take(seat: Seat, index: int) -> str:
    """Return the device at that index, or the error that a rank gets if it sees none there."""
    try:
        return f"GPU {seat.devices[index]}"
    except IndexError as error:
        return f"IndexError: {error}"


def draw_devices(seats: Sequence[Seat], rules: dict[str, Rule]) -> Figure:
    """Draw the devices that each rank sees, and the device that it takes by each of `rules`."""
    figure, panels = plt.subplots(
        1, len(rules), figsize=(7.5, 3.2), sharey=True, sharex=True, layout="constrained"
    )
    for panel, (title, rule) in zip(panels, rules.items(), strict=True):
        for row, seat in enumerate(seats):
            for index, name in enumerate(seat.devices):
                panel.text(index, row - 0.38, f"GPU {name}", ha="center", va="center", fontsize=8)
                look: dict = {"markersize": 21, "markerfacecolor": "white", "zorder": 1}
                panel.plot(index, row, "s", markeredgecolor=REFERENCE, **look)
            index = rule(seat)
            mark = "o" if index < len(seat.devices) else "X"
            panel.plot(index, row, mark, markersize=12, color=RANKS[seat.rank], zorder=2)
        panel.set(title=title, xlabel="device index", xticks=range(4), xlim=(-0.6, 3.6))
        panel.spines[["top", "right"]].set_visible(False)
    names = [f"rank {seat.rank}: node {seat.node}, local rank {seat.local_rank}" for seat in seats]
    panels[0].set(yticks=range(len(seats)), yticklabels=names, ylim=(len(seats) - 0.4, -0.7))
    return figure
