"""The exercise of chapter 00: the mean over the ranks."""

import os
from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from lesson import Exercise
from torch import Tensor

OWN = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])  # (rank, 2): what each rank brings


class Mean(NamedTuple):
    """What the function returned in groups of 3 and of 2 ranks, and its argument afterwards."""

    of_three: Tensor | None
    of_two: Tensor | None  # on ranks 0 and 1
    argument: Tensor


def _run_mean(mean_over_ranks: Callable[[Tensor], Tensor]) -> Mean:
    """Take the mean over all ranks, and then over ranks 0 and 1 in a group of their own."""
    rank, argument = int(os.environ["RANK"]), OWN[int(os.environ["RANK"])].clone()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def mean_in_group(size: int, tensor: Tensor) -> Tensor | None:
        if rank >= size:
            return None
        its_keys = dist.PrefixStore(str(size), store)
        dist.init_process_group("gloo", store=its_keys, rank=rank, world_size=size)
        dist.barrier()  # connects all ranks, whatever the reader's function does
        result = mean_over_ranks(tensor)
        dist.destroy_process_group()
        return result if isinstance(result, Tensor) else None

    return Mean(mean_in_group(3, argument), mean_in_group(2, OWN[rank].clone()), argument)


def _judge_mean(seen: list[Mean]) -> str | None:
    results = [own.of_three for own in seen if _is_a_row(own.of_three)]
    if len(results) < len(seen):
        return "on some rank, your function did not return a tensor of the shape of its argument."
    got, mean = torch.stack(results).float(), OWN.mean(0)  # (rank, 2), (2,)
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
    if torch.allclose(got, OWN.sum(0) / 2):
        return (
            f"your function divided the sum by 2, but there are {len(seen)} ranks here. Ask "
            "torch.distributed how many there are."
        )
    if not all(right):
        rank = right.index(False)
        return f"rank {rank} returned {got[rank].tolist()}, but the mean is {mean.tolist()}."
    for own in seen[:2]:
        if not _is_a_row(own.of_two) or not torch.allclose(own.of_two.float(), OWN[:2].mean(0)):
            return (
                "your function is right for 3 ranks, but not for 2. Ask torch.distributed for the "
                "world size, because it is not always 3."
            )
    if not torch.equal(torch.stack([own.argument for own in seen]), OWN):
        return (
            "the mean is right, but your function changed its argument. all_reduce works in "
            "place, so give it a copy."
        )
    return None


def _is_a_row(result: Tensor | None) -> TypeGuard[Tensor]:
    return result is not None and result.shape == (2,)


EXERCISES = {"mean_over_ranks": Exercise(_run_mean, _judge_mean, nproc=3)}
