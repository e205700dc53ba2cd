"""The exercises of chapter 06: a stream that is read once, and replicas that stay equal."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lesson import Exercise
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

ITEMS = 13  # a number that no count of shards divides
SHARDS = "Count every worker of every rank as one shard."
LIMIT = timedelta(seconds=20)  # of a collective that not all ranks call


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


# What differs on rank 1, and the hint if the function does not see it. None: nothing differs.
UNSEEN = {
    None: "your function returned False for equal replicas. Before you compare, check what the "
    "collective did to each tensor: a sum over two ranks is twice as large as a replica.",
    "last": "the last parameter differed and your function returned True. Look at every "
    "parameter, not only at the first.",
    "second": "the second of four parameters differed and your function returned True. Look "
    "at every parameter.",
    "swapped": "two weights had changed places and your function returned True. A sum cannot "
    "see that: compare element by element.",
    "small": "a weight differed in the seventh digit and your function returned True. Drift "
    "begins small, so compare exactly, without a tolerance.",
}


def observe_replicas_equal(replicas_equal: Callable[..., Any]) -> dict[Any, tuple[bool, bool]]:
    """Return, for each difference, the answer and whether the function changed the model."""
    dist.init_process_group("gloo", timeout=LIMIT)
    dist.barrier()  # connects the ranks, whatever the reader's function does
    seen = {}
    for case in UNSEEN:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        if dist.get_rank() == 1:
            _change(model, case)
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        answer = bool(replicas_equal(model))
        after = nn.utils.parameters_to_vector(model.parameters())
        seen[case] = answer, not torch.equal(before, after)
    dist.destroy_process_group()
    return seen


@torch.no_grad()
def _change(model: nn.Module, case: str | None) -> None:
    first, second, _, last = model.parameters()
    if case == "last":
        last.add_(1.0)
    elif case == "second":
        second.add_(1.0)
    elif case == "small":
        first[0, 0].mul_(1 + 2.0**-22)  # two units in the last place of a float32
    elif case == "swapped":
        first[0, :2] = first[0, :2].flip(0)


def judge_replicas_equal(ranks: list[dict[Any, tuple[bool, bool]]]) -> str | None:
    """Find a wrong answer, ranks that disagree, or a model that was changed by looking at it."""
    if any(changed for rank in ranks for _, changed in rank.values()):
        return (
            "your function changed the model that it should only inspect. A collective writes "
            "into the tensor that you pass, so pass a clone."
        )
    for case in UNSEEN:
        one, other = (rank[case][0] for rank in ranks)
        if one != other:
            return (
                f"the ranks disagree: rank 0 returned {one}, rank 1 returned {other}. "
                "Rank 0 equals itself. Compare results that all ranks have in common, such as the "
                "maximum and the minimum over the ranks."
            )
    wrong = [hint for case, hint in UNSEEN.items() if ranks[0][case][0] != (case is None)]
    return wrong[0] if wrong else None


EXERCISES = {
    "shard": Exercise(observe_shard, judge_shard),
    "replicas_equal": Exercise(observe_replicas_equal, judge_replicas_equal),
}
