"""Typical wrong answers to the exercise of chapter 10, and words of the hint each must get."""


def divides_everything(strategy, ranks):
    return (20 if strategy == "DDP" else 16) / ranks


def forgets_the_buckets(strategy, ranks):
    return 16


MISTAKES = {
    "bytes_per_weight": [
        (divides_everything, "DDP shards nothing"),
        (forgets_the_buckets, "each gradient exists twice"),
    ],
}
