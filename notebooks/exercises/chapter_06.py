"""The exercise of chapter 06: a stream that is read once."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from lesson import Exercise
from torch.utils.data import DataLoader, IterableDataset

ITEMS = 13  # a number that no count of shards divides
SHARDS = "Count every worker of every rank as one shard."


class _Stream(IterableDataset):
    def __init__(self, shard: Callable[..., Any], rank: int) -> None:
        self.shard, self.rank = shard, rank

    def __iter__(self) -> Iterator[int]:
        return iter(self.shard(iter(range(ITEMS)), self.rank, 2))


def observe_shard(shard: Callable[..., Any]) -> tuple[dict[int, list[int]], list[int]]:
    """Return what this rank reads, by the number of workers, and what three ranks would read."""
    stream, seen = _Stream(shard, int(os.environ["RANK"])), {}
    for workers in (0, 2, 3):
        fork = "fork" if workers else None  # a worker need not import the notebook's function
        loader = DataLoader(stream, None, num_workers=workers, multiprocessing_context=fork)
        seen[workers] = list(loader)
    return seen, [item for rank in range(3) for item in shard(iter(range(ITEMS)), rank, 3)]


def judge_shard(ranks: list[tuple[dict[int, list[int]], list[int]]]) -> str | None:
    """Find items that are read more often than once, or never."""
    (one, of_three), (other, _) = ranks
    counts = {workers: Counter(one[workers] + other[workers]) for workers in one}
    most = {workers: max(read.values(), default=0) for workers, read in counts.items()}
    if most[2] == 4:
        return (
            "every worker of every rank yields the whole stream. Each of them must skip the "
            f"items of all the others. {SHARDS}"
        )
    if most[0] > 1:
        return (
            "both ranks yield the same items, so `rank` makes no difference in your function. "
            f"{SHARDS}"
        )
    for workers, read in counts.items():
        if most[workers] > 1:
            return (
                f"with {workers} workers per rank, two workers of one rank yield the same items. "
                "Use both the id and the number of workers from `get_worker_info()`."
            )
        if missing := [item for item in range(ITEMS) if item not in read]:
            return (
                f"with {workers} workers per rank, nobody yields the items {missing}. "
                "Take every n-th item up to the end of the stream, where n is the number of shards."
            )
    if sorted(of_three) != list(range(ITEMS)):
        return (
            "your function is right on 2 ranks, but not on 3. The number of shards must be "
            "computed from `world_size`."
        )
    return None


EXERCISES = {"shard": Exercise(observe_shard, judge_shard)}
