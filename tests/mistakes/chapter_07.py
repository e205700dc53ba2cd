"""Wrong answers to the exercises of chapter 07, and words of the hint that each deserves."""


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


MISTAKES = {
    "assign_buckets": [
        (never_above_the_cap, "never exceed"),
        (without_the_rest, "gradients have a bucket"),
        (from_the_last, "in another order than"),
        (empty_at_the_end, "A bucket is empty"),
        (alone_only, "with a cap of 10, you made"),
        (one_each, "not a list of lists"),
    ],
}
