"""Simulated ranks that send each other chunks of numbers, and drawings of what they sent."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import cos, pi, sin

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from .palette import COMMUNICATE, RANKS, REFERENCE

RADIUS = 1.25  # of the circle on which the ranks are drawn
CELL = 0.27, 0.5  # width and height of a chunk there
LIMITS = {"xlim": (-1.85, 1.85), "ylim": (-1.6, 1.6), "aspect": "equal"}
Holdings = list[list[list[int]]]  # by rank and chunk: whose numbers are summed there


@dataclass(frozen=True)
class Message:
    """A chunk of `size` bytes that `source` sent to `target`, where it was added or copied."""

    step: int
    source: int
    target: int
    chunk: int
    add: bool
    size: int


class SimulatedRanks:
    """Ranks that each hold a vector, cut into as many chunks as there are ranks.

    Every message is logged in `log`, and every call of `exchange` counts as one step.
    """

    def __init__(self, vectors: Tensor) -> None:
        """Give each rank its vector.

        Args:
            vectors: (ranks, elements), where the number of elements is a multiple of the ranks.
        """
        self.world_size = len(vectors)
        # (rank, chunk, element)
        self._chunks = vectors.reshape(self.world_size, self.world_size, -1).clone()
        self.log: list[Message] = []
        self.steps = 0

    @property
    def vectors(self) -> Tensor:
        """The vectors that the ranks hold now, (ranks, elements)."""
        return self._chunks.flatten(1)

    def exchange(self, messages: Iterable[tuple[int, int, int]], *, add: bool) -> None:
        """Send messages from rank to rank, all at the same time.

        Args:
            messages: The source rank, the target rank and the number of the chunk.
            add: Whether a chunk is added to the target's own chunk, or replaces it.
        """
        self.steps += 1
        # All chunks are read before any is written, because a rank cannot pass on a chunk in the
        # same step in which it receives it.
        sent = [(message, self._chunks[message[0], message[2]].clone()) for message in messages]
        for (source, target, chunk), numbers in sent:
            if add:
                self._chunks[target, chunk] += numbers
            else:
                self._chunks[target, chunk] = numbers
            self.log.append(Message(self.steps, source, target, chunk, add, numbers.nbytes))

    def bytes_sent(self) -> list[int]:
        """Return how many bytes each rank has sent so far, in rank order."""
        return [
            sum(message.size for message in self.log if message.source == rank)
            for rank in range(self.world_size)
        ]


def ring_all_reduce(ranks: SimulatedRanks) -> None:
    """Sum the vectors in a ring, as in chapter 00: reduce-scatter, then all-gather."""
    n = ranks.world_size
    for step in range(n - 1):  # reduce-scatter: chunk r starts at rank r
        ranks.exchange([(r, (r + 1) % n, (r - step) % n) for r in range(n)], add=True)
    for step in range(n - 1):  # all-gather: rank r has the complete sum of chunk r + 1
        ranks.exchange([(r, (r + 1) % n, (r + 1 - step) % n) for r in range(n)], add=False)


def through_rank_0(ranks: SimulatedRanks) -> None:
    """Sum the vectors on rank 0, which then sends the sum to every other rank."""
    others, chunks = range(1, ranks.world_size), range(ranks.world_size)
    ranks.exchange([(rank, 0, chunk) for rank in others for chunk in chunks], add=True)
    ranks.exchange([(0, rank, chunk) for rank in others for chunk in chunks], add=False)


def replay(ranks: SimulatedRanks) -> list[Holdings]:
    """Return whose numbers each chunk held, at the start and after each step, from the log."""
    world = range(ranks.world_size)
    states: list[Holdings] = [[[[rank] for _ in world] for rank in world]]
    for step in range(1, ranks.steps + 1):
        before = states[-1]
        after = [[list(chunk) for chunk in row] for row in before]
        for message in (message for message in ranks.log if message.step == step):
            kept = after[message.target][message.chunk] if message.add else []
            arrived = before[message.source][message.chunk]
            after[message.target][message.chunk] = sorted(kept + arrived)
        states.append(after)
    return states


def draw_ring(ranks: SimulatedRanks) -> Figure:
    """Draw the ranks on a circle, step by step: what they sent and whose numbers they hold.

    The drawing is made from the log. It has room for 4 ranks.
    """
    states = replay(ranks)
    figure, grid = plt.subplots(2, 4, figsize=(9, 5.2), layout="constrained")
    for step, (axes, state) in enumerate(zip(grid.flat, states, strict=False)):
        messages = [message for message in ranks.log if message.step == step]
        _draw_state(axes, state, messages)
        phase = "" if step == 0 else ", add" if messages[0].add else ", copy"
        axes.set_title(f"step {step}{phase}" if step else "at the start", fontsize=10)
    for axes in grid.flat[len(states) :]:
        _draw_legend(axes)
    return figure


def _draw_state(axes: Axes, state: Holdings, messages: list[Message]) -> None:
    size, (width, height) = len(state), CELL
    angles = [pi / 2 - 2 * pi * rank / size for rank in range(size)]  # clockwise from the top
    corners = []  # of each rank's first chunk
    for rank, (row, angle) in enumerate(zip(state, angles, strict=True)):
        x, y = RADIUS * cos(angle) - size * width / 2, RADIUS * sin(angle) - height / 2
        corners.append((x, y))
        for chunk, whose in enumerate(row):
            _draw_chunk(axes, (x + chunk * width, y), whose, size)
        inside = 0.36 * cos(angle), 0.85 * sin(angle)
        axes.text(*inside, f"rank {rank}", ha="center", va="center", fontsize=8)
    for message in messages:
        x, y = corners[message.target]
        _draw_frame(axes, (x + message.chunk * width, y))
        _draw_arrow(axes, angles[message.source], angles[message.target], message.chunk)
    axes.set(**LIMITS)
    axes.axis("off")


def _draw_chunk(axes: Axes, corner: tuple[float, float], whose: list[int], size: int) -> None:
    """Draw a box with one stripe for each rank whose numbers are summed in it."""
    (x, y), (width, height) = corner, CELL
    for rank in whose:
        stripe = x, y + (size - 1 - rank) * height / size  # rank 0's is the top one
        axes.add_patch(Rectangle(stripe, width, height / size, color=RANKS[rank], linewidth=0))
    axes.add_patch(Rectangle(corner, *CELL, fill=False, edgecolor=REFERENCE, linewidth=0.7))


def _draw_frame(axes: Axes, corner: tuple[float, float]) -> None:
    """Mark a chunk that has just arrived."""
    frame = Rectangle(corner, *CELL, fill=False, edgecolor=COMMUNICATE, linewidth=2.5, zorder=3)
    axes.add_patch(frame)


def _draw_arrow(axes: Axes, source: float, target: float, chunk: int) -> None:
    """Draw an arrow with the chunk's number, along the circle from one angle to the next."""
    target -= 2 * pi * (target > source)  # clockwise
    # A row of chunks is wide, so at the top and the bottom of the circle an arrow starts later.
    first, last = (pi / 11 * (1 + abs(sin(angle))) for angle in (source, target))
    start, end = source - first, target + last
    tail, tip = [(RADIUS * cos(angle), RADIUS * sin(angle)) for angle in (start, end)]
    arrow = FancyArrowPatch(
        tail,
        tip,
        arrowstyle="-|>",
        connectionstyle="arc3,rad=-0.2",
        mutation_scale=10,
        linewidth=1.5,
        color=COMMUNICATE,
    )
    axes.add_patch(arrow)
    middle, outside = (start + end) / 2, RADIUS + 0.25
    place = outside * cos(middle), outside * sin(middle)
    axes.text(*place, str(chunk), ha="center", va="center", fontsize=8, color=COMMUNICATE)


def _draw_legend(axes: Axes) -> None:
    width, height = CELL
    for rank, color in enumerate(RANKS):
        y = 1.1 - 0.35 * rank
        axes.add_patch(Rectangle((-1.6, y), width, height / 4, color=color, linewidth=0))
        axes.text(-1.15, y, f"numbers of rank {rank}", fontsize=9)
    _draw_frame(axes, (-1.6, -0.75))
    axes.text(-1.15, -0.6, "chunk that just arrived", fontsize=9)
    axes.text(-1.5, -1.2, "2", fontsize=9, color=COMMUNICATE)
    axes.text(-1.15, -1.2, "chunk 2 is on its way", fontsize=9)
    axes.set(**LIMITS)
    axes.axis("off")


def draw_traffic(sent: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw what the busiest rank sends, in vectors.

    Args:
        sent: How many vectors the busiest rank sends, by algorithm and world size.
    """
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for (name, by_size), style in zip(sent.items(), ("o-", "s--", "^:"), strict=False):
        axes.plot(list(by_size), list(by_size.values()), style, color=COMMUNICATE, label=name)
    axes.axhline(2, color=REFERENCE, linestyle=":", linewidth=1, label="2 vectors")
    axes.set_xlabel("world size (ranks)")
    axes.set_ylabel("sent by the busiest\nrank (vectors)")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure
