"""Typical wrong answers to the exercise of chapter 00, and words of the hint each must get."""

import torch.distributed as dist


def returns_the_sum(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def calls_on_rank_0_alone(tensor):
    total = tensor.clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return total / dist.get_world_size()


def brings_another_size_on_rank_0(tensor):
    total = tensor.clone() if dist.get_rank() else tensor.repeat(10_000)
    dist.all_reduce(total)
    return total[: len(tensor)] / dist.get_world_size()


MISTAKES = {
    "mean_over_ranks": [
        (returns_the_sum, "returned the sum"),
        (calls_on_rank_0_alone, "for another rank that never made that call"),
        (brings_another_size_on_rank_0, "tensors of different sizes to one collective"),
    ],
}
