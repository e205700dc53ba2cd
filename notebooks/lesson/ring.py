"""Simulated ranks that send each other chunks of numbers."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

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
        """Give each rank its vector. `vectors`: (ranks, a multiple of the ranks)."""
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

        A message is a source rank, a target rank and the number of the chunk. It is added to the
        target's own chunk, or replaces it.
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


def ring_all_reduce(ranks: SimulatedRanks) -> None:
    """Sum the vectors in a ring, as in chapter 00: reduce-scatter, then all-gather."""
    n = ranks.world_size
    for step in range(n - 1):  # reduce-scatter: chunk r starts at rank r
        ranks.exchange([(r, (r + 1) % n, (r - step) % n) for r in range(n)], add=True)
    for step in range(n - 1):  # all-gather: rank r has the complete sum of chunk r + 1
        ranks.exchange([(r, (r + 1) % n, (r + 1 - step) % n) for r in range(n)], add=False)


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
