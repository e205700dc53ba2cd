"""Typical wrong answers to the exercises of chapter 10, and words of the hint each must get."""

import torch.distributed as dist


def divides_everything(strategy, ranks):
    return (20 if strategy == "DDP" else 16) / ranks


def forgets_the_buckets(strategy, ranks):
    return 16


def own_norm(shards, limit):
    norm = sum(shard.square().sum() for shard in shards).sqrt()
    for shard in shards:
        shard.mul_(min(1, limit / norm))
    return norm


def scales_copies(shards, limit):
    squares = sum(shard.square().sum() for shard in shards)
    dist.all_reduce(squares)
    norm = squares.sqrt()
    shards = [shard * min(1, limit / norm) for shard in shards]
    return norm


MISTAKES = {
    "bytes_per_weight": [
        (divides_everything, "DDP shards nothing"),
        (forgets_the_buckets, "each gradient exists twice"),
    ],
    "clip_shards": [
        (own_norm, "each rank measured its own shards"),
        (scales_copies, "scale them in place"),
    ],
}
