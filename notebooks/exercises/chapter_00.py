"""The exercises of chapter 00: the mean over the ranks, and an all-reduce of few steps."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from lesson import Exercise
from lesson.ring import SimulatedRanks, replay
from torch import Tensor

OWN = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])  # (rank, 2): what each one brings


class Mean(NamedTuple):
    """What the function returned in a group of 3 and one of 2 ranks, and its argument after it."""

    of_three: Tensor | None
    of_two: Tensor | None  # on ranks 0 and 1
    argument: Tensor


def _run_mean(mean_over_ranks: Callable[[Tensor], Tensor]) -> Mean:
    """Take the mean over all ranks, then over ranks 0 and 1, in a group of their own."""
    rank, argument = int(os.environ["RANK"]), OWN[int(os.environ["RANK"])].clone()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def mean_in_group(size: int, tensor: Tensor) -> Tensor | None:
        if rank >= size:
            return None
        its_keys = dist.PrefixStore(str(size), store)
        dist.init_process_group("gloo", store=its_keys, rank=rank, world_size=size)
        dist.barrier()  # all are connected, whatever the reader's function does
        result = mean_over_ranks(tensor)
        dist.destroy_process_group()
        return result if isinstance(result, Tensor) else None

    return Mean(mean_in_group(3, argument), mean_in_group(2, OWN[rank].clone()), argument)


def _judge_mean(seen: list[Mean]) -> str | None:
    results = [own.of_three for own in seen if _is_a_row(own.of_three)]
    if len(results) < len(seen):
        return "not every rank returned a tensor of the shape of its argument"
    got, mean = torch.stack(results).float(), OWN.mean(0)  # (rank, 2), (2,)
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
    for own in seen[:2]:
        if not _is_a_row(own.of_two) or not torch.allclose(own.of_two.float(), OWN[:2].mean(0)):
            return "it is right on 3 ranks, but not on 2: the world size is not always 3"
    if not torch.equal(torch.stack([own.argument for own in seen]), OWN):
        return "the mean is right, but the argument was changed: all_reduce works in place"
    return None


def _is_a_row(result: Tensor | None) -> TypeGuard[Tensor]:
    return result is not None and result.shape == (2,)


def _run_doubling(doubling_all_reduce: Callable[[SimulatedRanks], Any]) -> SimulatedRanks:
    """Let the function work on 8 simulated ranks, and return them."""
    generator = torch.Generator().manual_seed(0)
    ranks = SimulatedRanks(torch.randint(0, 100, (8, 16), generator=generator))
    doubling_all_reduce(ranks)
    return ranks


def _judge_doubling(seen: list[SimulatedRanks]) -> str | None:
    (ranks,) = seen
    for step in range(1, ranks.steps + 1):
        pairs = {(sent.source, sent.target) for sent in ranks.log if sent.step == step}
        for rank in range(ranks.world_size):
            if sum(source == rank for source, _ in pairs) > 1:
                return f"in step {step} rank {rank} sends to more than one rank"
            if sum(target == rank for _, target in pairs) > 1:
                return f"in step {step} rank {rank} gets from more than one rank"
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
