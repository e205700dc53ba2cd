"""Typical mistakes of chapter 12, and words of the hint that each must get."""

import torch.distributed as dist


def barrier_on_rank_0_alone(prepare):
    if dist.get_rank() == 0:
        prepare()
        dist.barrier()
    else:
        prepare()


def everyone_at_once(prepare):
    prepare()


def rank_0_alone(prepare):
    if dist.get_rank() == 0:
        prepare()
    dist.barrier()


def the_wrong_way_round(prepare):
    if dist.get_rank() != 0:
        prepare()
    dist.barrier()
    if dist.get_rank() == 0:
        prepare()


def prepares_twice(prepare):
    if dist.get_rank() == 0:
        prepare()
    dist.barrier()
    prepare()


MISTAKES = {
    "first_on_rank_0": [
        (barrier_on_rank_0_alone, "that the other rank never calls"),
        (everyone_at_once, "before rank 0 had finished"),
        (rank_0_alone, "rank 1 never called prepare()"),
        (the_wrong_way_round, "rank 0 came after it"),
        (prepares_twice, "2x on rank 0"),
    ],
}
