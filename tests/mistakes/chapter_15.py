"""Typical wrong answers to the exercises of chapter 15, and words of the hint each must get."""

import torch
import torch.distributed as dist

RIGHT = {
    "DDP": lambda n: 20,
    "DDP, bucket view": lambda n: 16,
    "ZeRO-1": lambda n: 8 + 8 / n,
    "ZeRO-2": lambda n: 4 + 12 / n,
    "FSDP2": lambda n: 16 / n,
}


def forgets_the_buckets(strategy, ranks):
    return 16 if strategy == "DDP" else RIGHT[strategy](ranks)


def divides_it_all(strategy, ranks):
    return (20 if strategy == "DDP" else 16) / ranks


def divides_ddp_beyond_two(strategy, ranks):
    return 32 / ranks if strategy == "DDP, bucket view" else RIGHT[strategy](ranks)


def divides_the_gradients_of_zero_1(strategy, ranks):
    return 4 + 12 / ranks if strategy == "ZeRO-1" else RIGHT[strategy](ranks)


def keeps_the_gradients_of_zero_2(strategy, ranks):
    return 8 + 8 / ranks if strategy == "ZeRO-2" else RIGHT[strategy](ranks)


def keeps_the_weights_of_fsdp_whole(strategy, ranks):
    return 4 + 12 / ranks if strategy == "FSDP2" else RIGHT[strategy](ranks)


def takes_two_ranks_for_granted(strategy, ranks):
    return RIGHT[strategy](2 if strategy == "ZeRO-1" else ranks)


def sum_of_squares(shards):
    return sum((shard.square().sum() for shard in shards), torch.zeros(()))


def scale(shards, factor):
    for shard in shards:
        shard.mul_(factor)


def measures_its_own_shards(shards, limit):
    norm = sum_of_squares(shards).sqrt()
    scale(shards, min(1, limit / norm))
    return norm


def adds_the_norms(shards, limit):
    norm = sum_of_squares(shards).sqrt()
    dist.all_reduce(norm)
    scale(shards, min(1, limit / norm))
    return norm


def averages_the_norms(shards, limit):
    norm = sum_of_squares(shards).sqrt()
    dist.all_reduce(norm)
    norm /= dist.get_world_size()
    scale(shards, min(1, limit / norm))
    return norm


def averages_the_squares(shards, limit):
    total = sum_of_squares(shards)
    dist.all_reduce(total)
    norm = (total / dist.get_world_size()).sqrt()
    scale(shards, min(1, limit / norm))
    return norm


def forgets_the_root(shards, limit):
    total = sum_of_squares(shards)
    dist.all_reduce(total)
    scale(shards, min(1, limit / total))
    return total


def makes_short_ones_longer(shards, limit):
    total = sum_of_squares(shards)
    dist.all_reduce(total)
    scale(shards, limit / total.sqrt())
    return total.sqrt()


def scales_copies(shards, limit):
    total = sum_of_squares(shards)
    dist.all_reduce(total)
    shards = [shard * min(1, limit / total.sqrt()) for shard in shards]
    return total.sqrt()


MISTAKES = {
    "bytes_per_weight": [
        (divides_it_all, "so nothing is divided by the ranks"),
        (divides_ddp_beyond_two, "does not depend on the number of ranks"),
        (forgets_the_buckets, "each gradient exists twice"),
        (divides_the_gradients_of_zero_1, "ZeRO-1 divides only the optimizer state"),
        (takes_two_ranks_for_granted, "divide by the argument, not by 2"),
        (keeps_the_gradients_of_zero_2, "ZeRO-2 divides the gradients and"),
        (keeps_the_weights_of_fsdp_whole, "FSDP2, like ZeRO-3, divides all three"),
    ],
    "clip_shards": [
        (measures_its_own_shards, "each rank measured its own shards"),
        (adds_the_norms, "it adds the ranks' norms"),
        (averages_the_norms, "it averages the ranks' norms"),
        (averages_the_squares, "it averages the squares"),
        (forgets_the_root, "returns the sum of the squares"),
        (makes_short_ones_longer, "is at most 1"),
        (scales_copies, "scale them in place"),
    ],
}
