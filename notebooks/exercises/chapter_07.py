"""Chapter 07: a stream that is seen once, replicas that stay equal."""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from lesson import Exercise
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ddp_ref import initialize_ddp

ITEMS = 13  # a number that no count of shards divides
THREE_RANKS = -1  # in place of a number of workers
LIMIT = timedelta(seconds=20)  # of a collective that not all ranks call


class _Stream(IterableDataset):
    def __init__(self, shard: Callable[..., Any], rank: int, world_size: int) -> None:
        self.shard, self.rank, self.world_size = shard, rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.shard(range(ITEMS), self.rank, self.world_size))


def observe_shard(shard: Callable[..., Any]) -> dict[int, list[int]]:
    """Return what this rank draws from a stream of 13 items, by the number of its workers."""
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
    """Find items that are drawn more often than once, or never."""
    of_three = Counter(ranks[0].pop(THREE_RANKS))
    counts = {n: Counter(item for rank in ranks for item in rank[n]) for n in ranks[0]}
    most = {n: max(drawn.values(), default=0) for n, drawn in counts.items()}
    if most[2] == 4:
        return "every worker of every rank yields the whole stream"
    if most[0] > 1:
        return "both ranks yield the same items: the rank makes no difference"
    for workers in (2, 3):
        if most[workers] > 1:
            return f"with {workers} workers, two of a rank yield the same items"
    for workers, drawn in counts.items():
        if missing := [item for item in range(ITEMS) if item not in drawn]:
            return f"with {workers} workers a rank, nobody yields the items {missing}"
    if of_three != Counter(range(ITEMS)):
        return "it is right on 2 ranks, but not on 3"
    return None


def observe_replicas_equal(replicas_equal: Callable[..., Any]) -> dict[str, tuple[bool, bool]]:
    """Return, for each way in which replicas may differ, the answer and whether a weight moved."""
    rank = initialize_ddp(LIMIT).rank
    seen = {}
    for case in ("none", "last", "second", "small", "swapped"):
        model = _model()
        if rank == 1:
            _change(model, case)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        answer = bool(replicas_equal(model))
        pairs = zip(before, model.parameters(), strict=True)
        seen[case] = answer, not all(torch.equal(old, new) for old, new in pairs)
    return seen


def judge_replicas_equal(ranks: list[dict[str, tuple[bool, bool]]]) -> str | None:
    """Find a wrong answer, ranks that disagree, or a model that was changed by looking at it."""
    if any(moved for rank in ranks for _, moved in rank.values()):
        return "your check changed the model that it was to look at"
    for case in ranks[0]:
        answers = [rank[case][0] for rank in ranks]
        if len(set(answers)) > 1:
            return f"the ranks disagree: rank 0 says {answers[0]}, rank 1 says {answers[1]}"
    if not ranks[0]["none"][0]:
        return "equal replicas are reported as different"
    unseen = {
        "last": "a difference in the last parameter is not seen",
        "second": "a difference in the second of four parameters is not seen",
        "swapped": "two values that changed places are not seen",
        "small": "a difference in the seventh digit is not seen: drift begins small",
    }
    return next((hint for case, hint in unseen.items() if ranks[0][case][0]), None)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@torch.no_grad()
def _change(model: nn.Module, case: str) -> None:
    first, second, _, last = model.parameters()
    if case == "last":
        last.add_(1.0)
    elif case == "second":
        second.add_(1.0)
    elif case == "small":
        first[0, 0].mul_(1 + 2.0**-22)  # two units in the last place of a float32
    elif case == "swapped":
        first[0, :2] = first[0, :2].flip(0)


EXERCISES = {
    "shard": Exercise(observe_shard, judge_shard),
    "replicas_equal": Exercise(observe_replicas_equal, judge_replicas_equal),
}
