"""Typical wrong answers to the exercise of chapter 04, each with words of its hint."""


def the_rank(rank, local_rank, visible):
    return rank


def the_rank_wrapped(rank, local_rank, visible):
    return rank % visible


def the_local_rank(rank, local_rank, visible):
    return local_rank


MISTAKES = {
    "device_index": [
        (the_rank, "with two ranks per node, rank 2 (local rank 0) takes index 2"),
        (the_rank_wrapped, "with --distribution=cyclic, ranks 0 and 2 are on one node and share"),
        (the_local_rank, "with --gpus-per-task=1, rank 1 (local rank 1) takes index 1"),
    ]
}
