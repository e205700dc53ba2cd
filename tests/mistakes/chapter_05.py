"""Several nodes: wrong answers, and a part of the hint for each."""


def the_rank(rank, local_rank, visible):
    return rank


def the_rank_wrapped(rank, local_rank, visible):
    return rank % visible


def the_local_rank(rank, local_rank, visible):
    return local_rank


def the_first_for_all(rank, local_rank, visible):
    return 0


MISTAKES = {
    "device_index": [
        (the_rank, "two ranks a node: rank 2, local rank 0, takes index 2, but sees 2 devices"),
        (the_rank_wrapped, "--distribution=cyclic: ranks 0 and 2 are on one node and share"),
        (the_local_rank, "--gpus-per-task=1: rank 1, local rank 1, takes index 1, but sees 1"),
        (the_first_for_all, "two ranks a node: ranks 0 and 1 are on one node and share device 0"),
    ]
}
