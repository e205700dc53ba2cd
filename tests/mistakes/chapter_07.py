"""Typical wrong answers to the exercises of chapter 07, each with words of its hint."""


def never_above_the_cap(sizes, cap):
    buckets, total = [[]], 0
    for number, size in enumerate(sizes):
        if buckets[-1] and total + size > cap:
            buckets.append([])
            total = 0
        buckets[-1].append(number)
        total += size
    return buckets


def without_the_rest(sizes, cap):
    buckets, bucket = [], []
    for number in range(len(sizes)):
        bucket.append(number)
        if sum(sizes[n] for n in bucket) >= cap:
            buckets.append(bucket)
            bucket = []
    return buckets


def from_the_last(sizes, cap):
    count = len(sizes)
    return [[count - 1 - n for n in bucket] for bucket in never_above_the_cap(sizes[::-1], cap)]


def empty_at_the_end(sizes, cap):
    buckets = [[]]
    for number in range(len(sizes)):
        buckets[-1].append(number)
        if sum(sizes[n] for n in buckets[-1]) >= cap:
            buckets.append([])
    return [*buckets, []]


def alone_only(sizes, cap):
    buckets, full = [], True
    for number, size in enumerate(sizes):
        if full:
            buckets.append([])
        buckets[-1].append(number)
        full = size >= cap
    return buckets


def one_each(sizes, cap):
    return len(sizes)


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


MISTAKES = {
    "assign_buckets": [
        (never_above_the_cap, "never exceed"),
        (without_the_rest, "gradients have a bucket"),
        (from_the_last, "in another order than"),
        (empty_at_the_end, "A bucket is empty"),
        (alone_only, "with a cap of 10, you made"),
        (one_each, "not a list of lists"),
    ],
    "break_even_gigabits": [
        (goes_round_once, "goes round the ring twice"),
        (answers_in_gigabytes, "a byte has 8 bits"),
        (counts_numbers_not_bytes, "each number takes 4 bytes"),
        (sends_a_vector_to_every_rank, "not n times it"),
        (forgets_that_a_chunk_is_small, "a rank sends only 1/n of it"),
        (sends_its_own_chunk_too, "all chunks but one"),
        (multiplies_by_the_time, "then divide by the time"),
    ],
}
