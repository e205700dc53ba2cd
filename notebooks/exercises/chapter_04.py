"""The exercise of chapter 04: which device a rank takes."""

from collections.abc import Callable
from typing import Any

from lesson import Exercise

# For the ranks on node 0 and on node 1: (rank, local rank, how many devices the rank sees).
LAYOUTS = {
    "two ranks per node": [[(0, 0, 2), (1, 1, 2)], [(2, 0, 2), (3, 1, 2)]],
    "--distribution=cyclic": [[(0, 0, 2), (2, 1, 2)], [(1, 0, 2), (3, 1, 2)]],
    "--gpus-per-task=1": [[(0, 0, 1), (1, 1, 1)], [(2, 0, 1), (3, 1, 1)]],
}


def observe(device_index: Callable[[int, int, int], Any]) -> list[Any]:
    """Return the indices that the ranks of each node take, in each layout."""
    return [[[device_index(*own) for own in node] for node in nodes] for nodes in LAYOUTS.values()]


def judge(seen: list[list[Any]]) -> str | None:
    for (layout, nodes), indices in zip(LAYOUTS.items(), seen[0], strict=True):
        for node, taken in zip(nodes, indices, strict=True):
            if hint := _wrong(node, taken):
                return f"with {layout}, {hint}"
    return None


def _wrong(ranks: list[tuple[int, int, int]], indices: list[Any]) -> str | None:
    for (rank, local_rank, visible), index in zip(ranks, indices, strict=True):
        if type(index) is not int or not 0 <= index < visible:
            return (
                f"rank {rank} (local rank {local_rank}) takes index {index!r}, but it sees "
                f"{visible} device{'s' * (visible > 1)}. {_idea(visible)}"
            )
    (first, _, visible), (second, _, _) = ranks
    if visible > 1 and indices[0] == indices[1]:
        return (
            f"ranks {first} and {second} are on one node and share device {indices[0]}. "
            "Which argument is different for all ranks of one node, and counts from 0 there?"
        )
    return None


def _idea(visible: int) -> str:
    if visible == 1:
        return "This is the rank's own device. What is its index, if the rank sees no other device?"
    return "Devices are counted from 0 on each node. Which of your three arguments is, too?"


EXERCISES = {"device_index": Exercise(observe, judge, nproc=0)}
