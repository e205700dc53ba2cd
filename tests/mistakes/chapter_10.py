"""Typical wrong answers to the exercises of chapter 10, and words of the hint each must get."""

import torch.distributed as dist

RIGHT = {
    "DDP": lambda n: 20,
    "DDP, bucket view": lambda n: 16,
    "ZeRO-1": lambda n: 8 + 8 / n,
    "ZeRO-2": lambda n: 4 + 12 / n,
    "FSDP2": lambda n: 16 / n,
}


def but(strategy, count):
    """Return a function that is right for all strategies but one."""
    return lambda name, ranks: (count if name == strategy else RIGHT[name])(ranks)


def own_norm(shards):
    return sum(shard.square().sum() for shard in shards).sqrt()


def norm_over_ranks(shards):
    squares = own_norm(shards).square()
    dist.all_reduce(squares)
    return squares.sqrt()


def clip_to(norm_of):
    """Return a function that clips by the wrong norm `norm_of(shards)`."""

    def clip(shards, limit):
        norm = norm_of(shards)
        for shard in shards:
            shard.mul_(min(1, limit / norm))
        return norm

    return clip


def sum_of_norms(shards):
    norm = own_norm(shards)
    dist.all_reduce(norm)
    return norm


def makes_short_ones_longer(shards, limit):
    norm = norm_over_ranks(shards)
    for shard in shards:
        shard.mul_(limit / norm)
    return norm


def scales_copies(shards, limit):
    norm = norm_over_ranks(shards)
    shards = [shard * min(1, limit / norm) for shard in shards]
    return norm


def scales_by_its_own_norm(shards, limit):
    norm = norm_over_ranks(shards)
    clip_to(own_norm)(shards, limit)
    return norm


MISTAKES = {
    "bytes_per_weight": [
        (lambda name, n: RIGHT[name](1) / n, "DDP shards nothing"),
        (but("DDP, bucket view", lambda n: 32 / n), "the number of ranks does not matter"),
        (but("DDP", lambda n: 16), "each gradient exists twice"),
        (but("ZeRO-1", lambda n: 4 + 12 / n), "ZeRO-1 divides only the optimizer state"),
        (but("ZeRO-1", lambda n: 12), "divide by the argument, not by 2"),
        (but("ZeRO-2", lambda n: 8 + 8 / n), "ZeRO-2 divides all but the weights"),
        (but("FSDP2", lambda n: 4 + 12 / n), "FSDP2 divides all three"),
    ],
    "clip_shards": [
        (clip_to(own_norm), "each rank measured its own shards"),
        (clip_to(sum_of_norms), "it adds the ranks' norms"),
        (clip_to(lambda shards: sum_of_norms(shards) / 2), "it averages the ranks' norms"),
        (clip_to(lambda shards: norm_over_ranks(shards) / 2**0.5), "it averages the squares"),
        (clip_to(lambda shards: norm_over_ranks(shards) ** 2), "returns the sum of the squares"),
        (makes_short_ones_longer, "is at most 1"),
        (scales_copies, "scale them in place"),
        (scales_by_its_own_norm, "on every rank by 0.1"),
    ],
}
