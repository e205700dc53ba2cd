"""Typical wrong answers to the exercise of chapter 00, and words of the hint each must get."""

import torch.distributed as dist


def returns_its_own(tensor):
    return tensor.clone()


def returns_the_sum(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def reduces_to_rank_0(tensor):
    total = tensor.clone()
    dist.reduce(total, dst=0)
    return total / dist.get_world_size()


def calls_on_rank_0_alone(tensor):
    total = tensor.clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return total / dist.get_world_size()


def brings_another_size_on_rank_0(tensor):
    total = tensor.clone() if dist.get_rank() else tensor.repeat(10_000)
    dist.all_reduce(total)
    return total[: len(tensor)] / dist.get_world_size()


def takes_two_ranks_for_granted(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / 2


def takes_four_ranks_for_granted(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / 4


def changes_its_argument(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def returns_nothing(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


MISTAKES = {
    "mean_over_ranks": [
        (returns_its_own, "nothing was exchanged"),
        (returns_the_sum, "returned the sum"),
        (calls_on_rank_0_alone, "for another rank that never made that call"),
        (brings_another_size_on_rank_0, "tensors of different sizes to one collective"),
        (reduces_to_rank_0, "only rank 0 has the mean"),
        (takes_two_ranks_for_granted, "divided the sum by 2"),
        (takes_four_ranks_for_granted, "divided the sum by 4"),
        (changes_its_argument, "changed its argument"),
        (returns_nothing, "did not return a tensor"),
    ],
}
