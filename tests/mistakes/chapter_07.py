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


def goes_round_once(parameters, world_size, backward):
    return 4 * parameters * (world_size - 1) / world_size / backward * 8 / 1e9


def answers_in_gigabytes(parameters, world_size, backward):
    return 4 * parameters * 2 * (world_size - 1) / world_size / backward / 1e9


MISTAKES = {
    "assign_buckets": [
        (never_above_the_cap, "never exceed"),
        (without_the_rest, "gradients have a bucket"),
    ],
    "break_even_gigabits": [
        (goes_round_once, "goes round the ring twice"),
        (answers_in_gigabytes, "a byte has 8 bits"),
    ],
}
