"""Typical wrong answers to the exercises of chapter 08, and words of the hint each must get."""

from lesson.ring import ring_all_reduce, through_rank_0


def goes_round_once(parameters, world_size, backward):
    return 4 * parameters * (world_size - 1) / world_size / backward * 8 / 1e9


def answers_in_gigabytes(parameters, world_size, backward):
    return 4 * parameters * 2 * (world_size - 1) / world_size / backward / 1e9


def counts_numbers_not_bytes(parameters, world_size, backward):
    return parameters * 2 * (world_size - 1) / world_size / backward * 8 / 1e9


def sends_a_vector_to_every_rank(parameters, world_size, backward):
    return 4 * parameters * 2 * world_size / backward * 8 / 1e9


def forgets_that_a_chunk_is_small(parameters, world_size, backward):
    return 4 * parameters * 2 * (world_size - 1) / backward * 8 / 1e9


def sends_its_own_chunk_too(parameters, world_size, backward):
    return 4 * parameters * 2 / backward * 8 / 1e9


def multiplies_by_the_time(parameters, world_size, backward):
    return 4 * parameters * 2 * (world_size - 1) / world_size * backward * 8 / 1e9


def goes_round_the_ring(ranks):
    ring_all_reduce(ranks)


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
    through_rank_0(ranks)


def sends_all_to_all(ranks):
    world = range(ranks.world_size)
    pairs = [(one, other) for one in world for other in world if one != other]
    ranks.exchange([(*pair, chunk) for pair in pairs for chunk in world], add=True)


MISTAKES = {
    "break_even_gigabits": [
        (goes_round_once, "goes round the ring twice"),
        (answers_in_gigabytes, "a byte has 8 bits"),
        (counts_numbers_not_bytes, "each number takes 4 bytes"),
        (sends_a_vector_to_every_rank, "not n or n - 1 times it"),
        (forgets_that_a_chunk_is_small, "a rank sends only 1/n of it"),
        (sends_its_own_chunk_too, "all chunks but one"),
        (multiplies_by_the_time, "then divide by the time"),
    ],
    "doubling_all_reduce": [
        (goes_round_the_ring, "took 14 steps"),
        (keeps_the_same_partner, "more than once"),
        (sends_all_to_rank_0, "receives from more than one rank"),
        (sends_all_to_all, "sends to more than one rank"),
        (replaces_what_is_there, "is the sum of ranks"),
    ],
}
