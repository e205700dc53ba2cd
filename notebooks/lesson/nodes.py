"""Ranks on nodes: what the launcher told each rank, and which device the rank takes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .commands import run_unseen
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


def two_node_shell(command: str, *, folder: Path, pipe_to: str) -> str:
    """Run `command` twice at the same time, as if you typed it in a terminal on each of two nodes.

    Args:
        command: `$NODE` in it stands for the number of the node, 0 or 1.
        folder: where it runs. Its stderr goes to agent0.log and agent1.log there.
        pipe_to: the command that reads what both write to stdout, such as "sort".

    Returns:
        what `pipe_to` wrote, which is also printed.
    """
    commands = [command.replace("$NODE", str(node)) for node in range(2)]
    for node, typed in enumerate(commands):
        print(f"node {node} $ {typed}", flush=True)
    started = " ".join(f"({typed}) 2> agent{node}.log &" for node, typed in enumerate(commands))
    return run_unseen(f"({started} wait) | {pipe_to}", folder=folder)


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
