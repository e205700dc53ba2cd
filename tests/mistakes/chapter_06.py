"""Typical wrong answers to the exercise of chapter 06, and words of the hint each must get."""

from itertools import islice

from torch.utils.data import get_worker_info


def whole_stream(stream, rank, world_size):
    yield from stream


def shard_by_worker(stream, rank, world_size):
    info = get_worker_info()
    yield from islice(stream, info.id if info else 0, None, info.num_workers if info else 1)


MISTAKES = {
    "shard": [
        (whole_stream, "every worker of every rank yields the whole stream"),
        (shard_by_worker, "so `rank` makes no difference"),
    ],
}
