"""Typical wrong answers to the exercises of chapter 06, and words of the hint each must get."""

from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector
from torch.utils.data import get_worker_info


def whole_stream(stream, rank, world_size):
    yield from stream


def shard_by_worker(stream, rank, world_size):
    info = get_worker_info()
    yield from islice(stream, info.id if info else 0, None, info.num_workers if info else 1)


def own_verdict(model):
    own = parameters_to_vector(model.parameters()).detach()
    rank_0 = own.clone()
    dist.broadcast(rank_0, src=0)
    return torch.equal(own, rank_0)


def compare_sums(model):
    least = parameters_to_vector(model.parameters()).detach().double().sum()
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return torch.equal(least, most)


MISTAKES = {
    "shard": [
        (whole_stream, "every worker of every rank yields the whole stream"),
        (shard_by_worker, "so `rank` makes no difference"),
    ],
    "replicas_equal": [
        (own_verdict, "the ranks disagree"),
        (compare_sums, "two weights had changed places"),
    ],
}
