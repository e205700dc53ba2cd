"""Typical mistakes in the exercise of chapter 08, and words of the hint that each must get."""

import torch.distributed as dist


def barrier_on_rank_0_alone(prepare):
    prepare()
    if dist.get_rank() == 0:
        dist.barrier()


def prepares_twice(prepare):
    if dist.get_rank() == 0:
        prepare()
    dist.barrier()
    prepare()


MISTAKES = {
    "first_on_rank_0": [
        (barrier_on_rank_0_alone, "that the other rank never calls"),
        (prepares_twice, "2x on rank 0"),
    ],
}
