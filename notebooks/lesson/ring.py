"""Simulated ranks that send each other chunks of numbers, log it, and are drawn step by step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

ARRIVED = "tab:orange"
LEGEND = """Digits: the ranks
whose numbers are
summed in a chunk.

Orange: has just come
from the rank before."""
Holdings = list[list[list[int]]]  # by rank and chunk: whose numbers are summed there


@dataclass(frozen=True)
class Message:
    """A chunk that `source` sent to `target` in one step: `size` bytes, added or copied there."""

    step: int
    source: int
    target: int
    chunk: int
    add: bool
    size: int


class SimulatedRanks:
    """Ranks with a vector each, cut into as many chunks as there are ranks.

    vectors: (ranks, elements), where the elements are a multiple of the ranks.
    """

    def __init__(self, vectors: Tensor) -> None:
        self.world_size = len(vectors)
        # (rank, chunk, element)
        self._chunks = vectors.reshape(self.world_size, self.world_size, -1).clone()
        self.log: list[Message] = []
        self.steps = 0

    @property
    def vectors(self) -> Tensor:
        """What the ranks hold now, (ranks, elements)."""
        return self._chunks.flatten(1)

    def exchange(self, messages: Iterable[tuple[int, int, int]], *, add: bool) -> None:
        """Send (source, target, chunk) messages in one step, all at once.

        What arrives is added to the target's chunk of that number, or replaces it.
        """
        self.steps += 1
        # All are read before any arrives: a rank cannot pass on what it gets in the same step.
        sent = [(message, self._chunks[message[0], message[2]].clone()) for message in messages]
        for (source, target, chunk), numbers in sent:
            if add:
                self._chunks[target, chunk] += numbers
            else:
                self._chunks[target, chunk] = numbers
            self.log.append(Message(self.steps, source, target, chunk, add, numbers.nbytes))

    def bytes_sent(self) -> list[int]:
        """Return how many bytes each rank has sent so far."""
        return [
            sum(message.size for message in self.log if message.source == rank)
            for rank in range(self.world_size)
        ]


def replay(ranks: SimulatedRanks) -> list[Holdings]:
    """Return, from the log alone, whose numbers each chunk held: at the start, after each step."""
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
    """Draw whose numbers are summed in each chunk of each rank, step by step, from the log."""
    states, half = replay(ranks), ranks.steps // 2
    figure, grid = plt.subplots(2, half + 1, figsize=(8, 5), layout="constrained")
    grid[1, 0].axis("off")
    grid[1, 0].text(0, 0.5, LEGEND, va="center", fontsize=9)
    _draw_state(grid[0, 0], states[0], "start", [])
    for step, state in enumerate(states[1:], start=1):
        messages = [message for message in ranks.log if message.step == step]
        phase = "reduce-scatter" if messages[0].add else "all-gather"
        axes = [*grid[0, 1:], *grid[1, 1:]][step - 1]
        _draw_state(axes, state, f"{step}: {phase}", messages)
    for axes in (grid[0, 0], grid[1, 1]):
        axes.set_ylabel("rank")
    return figure


def _draw_state(axes: Axes, state: Holdings, title: str, messages: list[Message]) -> None:
    world = range(len(state))
    counts = [[len(chunk) for chunk in row] for row in state]
    axes.imshow(counts, cmap="Blues", vmin=0, vmax=1.5 * len(state))  # dark text stays legible
    for rank, row in enumerate(state):
        for chunk, whose in enumerate(row):
            text = "".join(map(str, whose))
            axes.text(chunk, rank, text, ha="center", va="center", fontsize=8)
    for message in messages:
        corner = (message.chunk - 0.44, message.target - 0.44)
        axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=ARRIVED, linewidth=2))
    axes.set_title(title, fontsize=9)
    axes.set_xticks(world)
    axes.set_yticks(world)
    axes.set_xlabel("chunk")


def draw_traffic(sent: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw what the busiest rank sends, in vectors, by algorithm and world size."""
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for (name, by_size), marker in zip(sent.items(), "os^", strict=False):
        axes.plot(list(by_size), list(by_size.values()), marker=marker, label=name)
    axes.axhline(2, color="gray", linestyle=":", label="2 vectors")
    axes.set_xlabel("world size (ranks)")
    axes.set_ylabel("sent by the busiest\nrank (vectors)")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure
