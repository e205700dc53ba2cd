"""When each rank works and when it is in a collective: noted on the ranks, drawn as lanes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .palette import COMPUTE, WAIT

STYLES: dict[str, dict[str, Any]] = {
    "work": {"facecolor": COMPUTE, "edgecolor": "white"},
    "wait": {"facecolor": WAIT, "edgecolor": "white", "hatch": "///"},
}
WIDE = 0.17  # the share of a lane that an event must fill to have room for its label


class Event(NamedTuple):
    """What a rank did, and when: seconds of the clock that all processes of a host share."""

    what: str  # "work" or "wait"
    label: str
    begin: float
    end: float
    failed: bool


class Lane:
    """The events of one rank: `with lane("wait", "step 3"): ...` adds one."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @contextmanager
    def __call__(self, what: str, label: str = "") -> Iterator[None]:
        begin, failed = time.monotonic(), True
        try:
            yield
            failed = False
        finally:
            self.events.append(Event(what, label, begin, time.monotonic(), failed))


def draw_swimlanes(
    runs: Mapping[str, Sequence[Sequence[Event]]], waits: str = "waits in a collective"
) -> Figure:
    """Draw one panel per run (title -> events by rank), with one lane per rank.

    The legend explains an event "wait" with `waits`.
    """
    rows = -(-len(runs) // 2)
    size = (9, 1.8 * rows + 0.3)
    figure, panels = plt.subplots(rows, 2, figsize=size, squeeze=False, layout="constrained")
    for panel in panels.flat[len(runs) :]:
        panel.set_visible(False)
    for panel, (title, lanes) in zip(panels.flat, runs.items(), strict=False):
        _draw(panel, lanes)
        panel.set_title(title, fontsize=9, loc="left")
    meaning = {"work": "works", "wait": waits}
    keys: list[Artist] = [Patch(label=meaning[what], **style) for what, style in STYLES.items()]
    keys.append(Line2D([], [], color="black", marker="X", linestyle="", label="raises"))
    figure.legend(handles=keys, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw(panel: Axes, lanes: Sequence[Sequence[Event]]) -> None:
    start = min(event.begin for events in lanes for event in events)
    span = max(event.end for events in lanes for event in events) - start
    for rank, events in enumerate(lanes):
        for event in events:
            begin, length = event.begin - start, event.end - event.begin
            panel.broken_barh([(begin, length)], (rank - 0.35, 0.7), **STYLES[event.what])
            if event.failed:
                panel.plot(begin + length, rank, "X", color="black", markersize=8, clip_on=False)
            if event.label and length > WIDE * span:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                middle = begin + length / 2
                panel.text(
                    middle, rank, event.label, ha="center", va="center", fontsize=8, bbox=box
                )
    panel.set_yticks(range(len(lanes)), [f"rank {rank}" for rank in range(len(lanes))])
    panel.set_ylim(len(lanes) - 0.5, -0.5)
    panel.set_xlim(0, span * 1.03)
    panel.set_xlabel("seconds since the first event", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
