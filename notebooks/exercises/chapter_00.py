"""The exercise of chapter 00: the mean over the ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lesson import Exercise
from torch import Tensor

OWN = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])  # (rank, 2): what each rank brings


def _run_mean(mean_over_ranks: Callable[[Tensor], Any]) -> tuple[Any, Tensor]:
    """Return what the function returns on this rank, and its argument afterwards."""
    dist.init_process_group("gloo")
    dist.barrier()  # connects all ranks, whatever the reader's function does
    argument = OWN[dist.get_rank()].clone()
    result = mean_over_ranks(argument)
    dist.destroy_process_group()
    return result, argument


def _judge_mean(seen: list[tuple[Any, Tensor]]) -> str | None:
    if not all(isinstance(result, Tensor) and result.shape == (2,) for result, _ in seen):
        return "on some rank, your function did not return a tensor of the shape of its argument."
    got, mean = torch.stack([result for result, _ in seen]).float(), OWN.mean(0)  # (rank, 2), (2,)
    right = torch.isclose(got, mean).all(1).tolist()
    if right == [True, False, False]:
        return (
            "only rank 0 has the mean, but every rank should. Look for the collective that gives "
            "the sum to every rank."
        )
    if torch.equal(got, OWN):
        return (
            "every rank returned its own numbers, so nothing was exchanged. Call a collective that "
            "adds up the tensors of all ranks."
        )
    if torch.allclose(got, OWN.sum(0)):
        return "every rank returned the sum over the ranks. The mean is the sum, divided by what?"
    for count in (2, 4):
        if torch.allclose(got, OWN.sum(0) / count):
            return (
                f"your function divided the sum by {count}, but there are {len(seen)} ranks here. "
                "Ask torch.distributed how many there are."
            )
    if not all(right):
        rank = right.index(False)
        return f"rank {rank} returned {got[rank].tolist()}, but the mean is {mean.tolist()}."
    if not torch.equal(torch.stack([argument for _, argument in seen]), OWN):
        return (
            "the mean is right, but your function changed its argument. all_reduce works in "
            "place, so give it a copy."
        )
    return None


EXERCISES = {"mean_over_ranks": Exercise(_run_mean, _judge_mean, nproc=3)}
