"""Chapter 09: a stream of which every item is read once."""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from lesson import Exercise
from torch.utils.data import DataLoader, IterableDataset

from ddp_ref import initialize_ddp

ITEMS = 13  # a number that no count of shards divides
THREE_RANKS = -1  # in place of a number of workers
LIMIT = timedelta(seconds=20)  # of a collective that not all ranks call
SHARDS = "Count every worker of every rank as one shard."


class _Stream(IterableDataset):
    def __init__(self, shard: Callable[..., Any], rank: int, world_size: int) -> None:
        self.shard, self.rank, self.world_size = shard, rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.shard(range(ITEMS), self.rank, self.world_size))


def observe_shard(shard: Callable[..., Any]) -> dict[int, list[int]]:
    """Return what this rank reads from a stream of 13 items, by the number of its workers."""
    info = initialize_ddp(LIMIT)
    stream = _Stream(shard, info.rank, info.world_size)
    seen = {0: list(DataLoader(stream, None))}
    for workers in (2, 3):
        loader = DataLoader(stream, None, num_workers=workers, multiprocessing_context="fork")
        seen[workers] = list(loader)
    if info.rank == 0:  # an argument is enough: no group of three is needed
        of_three = [list(shard(range(ITEMS), rank, 3)) for rank in range(3)]
        seen[THREE_RANKS] = [item for items in of_three for item in items]
    return seen


def judge_shard(ranks: list[dict[int, list[int]]]) -> str | None:
    """Find items that are read more often than once, or never."""
    of_three = Counter(ranks[0].pop(THREE_RANKS))
    counts = {n: Counter(item for rank in ranks for item in rank[n]) for n in ranks[0]}
    most = {n: max(read.values(), default=0) for n, read in counts.items()}
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
    for workers in (2, 3):
        if most[workers] > 1:
            return (
                f"with {workers} workers per rank, two workers of one rank yield the same items. "
                "Use both the id and the number of workers from `get_worker_info()`."
            )
    for workers, read in counts.items():
        if missing := [item for item in range(ITEMS) if item not in read]:
            return (
                f"with {workers} workers per rank, nobody yields the items {missing}. "
                "Take every n-th item up to the end of the stream, where n is the number of shards."
            )
    if of_three != Counter(range(ITEMS)):
        return (
            "your function is right on 2 ranks, but not on 3. The number of shards must be "
            "computed from `world_size`."
        )
    return None


EXERCISES = {"shard": Exercise(observe_shard, judge_shard)}
