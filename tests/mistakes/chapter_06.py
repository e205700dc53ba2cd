"""Typical wrong answers to the exercises of chapter 06, and words of the hint each must get."""

from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector
from torch.utils.data import get_worker_info


def worker_of():
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def whole_stream(stream, rank, world_size):
    yield from stream


def shard_by_worker(stream, rank, world_size):
    worker, workers = worker_of()
    yield from islice(stream, worker, None, workers)


def shard_cut_even(stream, rank, world_size):
    worker, workers = worker_of()
    size = 13 // (world_size * workers)
    start = (rank * workers + worker) * size
    yield from islice(stream, start, start + size)


def shard_for_two_workers(stream, rank, world_size):
    worker, workers = worker_of()[0], 2 if get_worker_info() else 1
    yield from islice(stream, rank * workers + worker, None, world_size * workers)


def shard_for_two_ranks(stream, rank, world_size):
    worker, workers = worker_of()
    yield from islice(stream, rank * workers + worker, None, 2 * workers)


def flat(model):
    return parameters_to_vector(model.parameters()).detach()


def least_and_most(tensor):
    least, most = tensor.clone(), tensor.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return least, most


def own_verdict(model):
    rank_0 = flat(model)
    dist.broadcast(rank_0, src=0)
    return torch.equal(flat(model), rank_0)


def compare_sums(model):
    return torch.equal(*least_and_most(flat(model).double().sum()))


def first_parameter_only(model):
    return torch.equal(*least_and_most(next(model.parameters()).detach()))


def nearly_equal(model):
    return torch.allclose(*least_and_most(flat(model)))


def equal_by_force(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return own_verdict(model)


def compare_with_the_sum(model):
    total = flat(model)
    dist.all_reduce(total)
    return torch.equal(flat(model), total)


MISTAKES = {
    "shard": [
        (whole_stream, "every worker of every rank yields the whole stream"),
        (shard_for_two_workers, "with 3 workers per rank, two workers of one rank"),
        (shard_by_worker, "so `rank` makes no difference"),
        (shard_for_two_ranks, "but not on 3"),
        (shard_cut_even, "with 0 workers per rank, nobody yields the items [12]"),
    ],
    "replicas_equal": [
        (own_verdict, "the ranks disagree"),
        (compare_sums, "two weights had changed places"),
        (first_parameter_only, "the last parameter differed"),
        (nearly_equal, "differed in the seventh digit"),
        (equal_by_force, "your function changed the model"),
        (compare_with_the_sum, "returned False for equal replicas"),
    ],
}
