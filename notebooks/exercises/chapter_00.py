"""The exercises of chapter 00: the mean over the ranks, and an all-reduce of few steps."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lesson import Exercise
from lesson.ring import SimulatedRanks, replay
from torch import Tensor

OWN = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])  # (rank, 2): what each one brings


def _run_mean(mean_over_ranks: Callable[[Tensor], Tensor]) -> tuple[Tensor | None, Tensor]:
    """Return the mean of this rank's tensor over the ranks, and what the argument is afterwards."""
    dist.init_process_group("gloo")
    tensor = OWN[dist.get_rank()].clone()
    result = mean_over_ranks(tensor)
    dist.destroy_process_group()
    return result if isinstance(result, Tensor) else None, tensor


def _judge_mean(seen: list[tuple[Tensor | None, Tensor]]) -> str | None:
    results = [result for result, _ in seen if result is not None and result.shape == (2,)]
    if len(results) < len(seen):
        return "not every rank returned a tensor of the shape of its argument"
    got, mean = torch.stack(results), OWN.mean(0)  # (rank, 2), (2,)
    right = torch.isclose(got, mean).all(1).tolist()
    if right == [True, False, False]:
        return "only rank 0 has the mean: every rank should have it"
    if torch.equal(got, OWN):
        return "every rank got its own numbers back: nothing was exchanged"
    if torch.allclose(got, OWN.sum(0)):
        return "every rank returned the sum over the ranks, not their mean"
    if torch.allclose(got, OWN.sum(0) / 2):
        return f"there are {len(seen)} ranks here, and the sum was divided by 2"
    if not all(right):
        rank = right.index(False)
        return f"rank {rank} returned {got[rank].tolist()}, where the mean is {mean.tolist()}"
    if not torch.equal(torch.stack([tensor for _, tensor in seen]), OWN):
        return "the mean is right, but the argument was changed: all_reduce works in place"
    return None


def _run_doubling(doubling_all_reduce: Callable[[SimulatedRanks], Any]) -> SimulatedRanks:
    """Let the function work on 8 simulated ranks, and return them."""
    generator = torch.Generator().manual_seed(0)
    ranks = SimulatedRanks(torch.randint(0, 100, (8, 16), generator=generator))
    doubling_all_reduce(ranks)
    return ranks


def _judge_doubling(seen: list[SimulatedRanks]) -> str | None:
    (ranks,) = seen
    everyone = list(range(ranks.world_size))
    for rank, row in enumerate(replay(ranks)[-1]):
        for chunk, whose in enumerate(row):
            at = f"rank {rank}'s chunk {chunk}"
            if twice := [other for other in whose if whose.count(other) > 1]:
                return f"{at} has the numbers of rank {twice[0]} in it more than once"
            if whose != everyone:
                return f"{at} holds the numbers of ranks {whose} only, after {ranks.steps} steps"
    if ranks.steps > 3:
        return f"the sums are right, but took {ranks.steps} steps: for 8 ranks 3 are enough"
    return None


EXERCISES = {
    "mean_over_ranks": Exercise(_run_mean, _judge_mean, nproc=3),
    "doubling_all_reduce": Exercise(_run_doubling, _judge_doubling, nproc=1),
}
