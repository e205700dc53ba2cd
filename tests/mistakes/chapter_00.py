"""Typical wrong answers to the exercises of chapter 00, and words of the hint each must get."""

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


def takes_two_ranks_for_granted(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / 2


def takes_three_ranks_for_granted(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / 3


def changes_its_argument(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def returns_nothing(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def goes_round_the_ring(ranks):
    n = ranks.world_size
    for shift, add in ((0, True), (1, False)):
        for step in range(n - 1):
            chunks = [(rank + shift - step) % n for rank in range(n)]
            ranks.exchange([(rank, (rank + 1) % n, chunks[rank]) for rank in range(n)], add=add)


def exchanges(ranks, distances, add=True):
    world = range(ranks.world_size)
    for distance in distances:
        pairs = [(rank, rank ^ distance) for rank in world]
        ranks.exchange([(*pair, chunk) for pair in pairs for chunk in world], add=add)


def keeps_the_same_partner(ranks):
    exchanges(ranks, [1, 1, 1])


def replaces_what_is_there(ranks):
    exchanges(ranks, [1, 2, 4], add=False)


def sends_all_to_rank_0(ranks):
    others, chunks = range(1, ranks.world_size), range(ranks.world_size)
    ranks.exchange([(rank, 0, chunk) for rank in others for chunk in chunks], add=True)
    ranks.exchange([(0, rank, chunk) for rank in others for chunk in chunks], add=False)


def sends_all_to_all(ranks):
    world = range(ranks.world_size)
    pairs = [(one, other) for one in world for other in world if one != other]
    ranks.exchange([(*pair, chunk) for pair in pairs for chunk in world], add=True)


MISTAKES = {
    "mean_over_ranks": [
        (returns_its_own, "nothing was exchanged"),
        (returns_the_sum, "returned the sum"),
        (reduces_to_rank_0, "only rank 0 has the mean"),
        (takes_two_ranks_for_granted, "was divided by 2"),
        (takes_three_ranks_for_granted, "the world size is not always 3"),
        (changes_its_argument, "the argument was changed"),
        (returns_nothing, "not every rank returned a tensor"),
    ],
    "doubling_all_reduce": [
        (goes_round_the_ring, "took 14 steps"),
        (keeps_the_same_partner, "more than once"),
        (sends_all_to_rank_0, "gets from more than one rank"),
        (sends_all_to_all, "sends to more than one rank"),
        (replaces_what_is_there, "holds the numbers of ranks"),
    ],
}
