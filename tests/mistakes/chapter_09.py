"""Typical wrong answers to the exercise of chapter 09, and words of the hint each must get."""

from itertools import islice

from torch.utils.data import get_worker_info


def whole_stream(stream, rank, world_size):
    yield from stream


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


def shard_for_two_workers(stream, rank, world_size):
    info = get_worker_info()
    worker, workers = (info.id, 2) if info else (0, 1)
    yield from islice(stream, rank * workers + worker, None, world_size * workers)


def shard_for_two_ranks(stream, rank, world_size):
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    yield from islice(stream, rank * workers + worker, None, 2 * workers)


MISTAKES = {
    "shard": [
        (whole_stream, "every worker of every rank yields the whole stream"),
        (shard_for_two_workers, "with 3 workers per rank, two workers of one rank"),
        (shard_by_worker, "so `rank` makes no difference"),
        (shard_for_two_ranks, "but not on 3"),
        (shard_cut_even, "with 0 workers per rank, nobody yields the items [12]"),
    ],
}
