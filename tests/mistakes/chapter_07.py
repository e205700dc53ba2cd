"""Typical wrong answers to the exercises of chapter 07, and words of the hint each must get."""

from itertools import islice

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info


def whole_stream(stream, rank, world_size):
    yield from stream


def shard_by_rank(stream, rank, world_size):
    yield from islice(stream, rank, None, world_size)


def shard_by_worker(stream, rank, world_size):
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    yield from islice(stream, worker, None, workers)


def shard_cut_even(stream, rank, world_size):
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    size = len(stream) // (world_size * workers)
    start = (rank * workers + worker) * size
    yield from islice(stream, start, start + size)


def shard_of_nothing(stream, rank, world_size):
    yield from ()


def shard_for_two_workers(stream, rank, world_size):
    info = get_worker_info()
    worker, workers = (info.id, 2) if info else (0, 1)
    yield from islice(stream, rank * workers + worker, None, world_size * workers)


def shard_for_two_ranks(stream, rank, world_size):
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    yield from islice(stream, rank * workers + worker, None, 2 * workers)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def own_verdict(model):
    mine = flat(model)
    other = mine.clone()
    dist.broadcast(other, src=0)
    return torch.equal(mine, other)


def compare_sums(model):
    total = flat(model).double().sum()
    most, least = total.clone(), total.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(most == least)


def first_parameter_only(model):
    most = next(model.parameters()).detach().clone()
    least = most.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return torch.equal(most, least)


def nearly_equal(model):
    most, least = flat(model), flat(model)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return torch.allclose(most, least)


def equal_by_force(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return own_verdict(model)


MISTAKES = {
    "shard": [
        (whole_stream, "every worker of every rank yields the whole stream"),
        (shard_by_rank, "with 2 workers, two of a rank yield the same items"),
        (shard_of_nothing, "with 0 workers a rank, nobody yields the items [0, 1, 2, 3"),
        (shard_for_two_workers, "with 3 workers, two of a rank yield the same items"),
        (shard_by_worker, "the rank makes no difference"),
        (shard_for_two_ranks, "but not on 3"),
        (shard_cut_even, "with 0 workers a rank, nobody yields the items [12]"),
    ],
    "replicas_equal": [
        (own_verdict, "the ranks disagree"),
        (compare_sums, "changed places are not seen"),
        (first_parameter_only, "the last parameter is not seen"),
        (nearly_equal, "the seventh digit is not seen"),
        (equal_by_force, "your check changed the model"),
    ],
}
