"""Seeing DDP: how gradients are divided into buckets."""

from itertools import chain, pairwise

import torch
from lesson import Exercise
from lesson.buckets import note_and_reduce
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import initialize_ddp

SIZES = (64, 64, 192, 64, 8)
CAP = 20_000  # bytes
SMALL = [4, 6, 2, 8, 1, 1, 1], 10  # none reaches the cap alone, and the first two are just 10


def _buckets(assign_buckets):
    """Return the function's buckets and those of DDP, for the same parameters."""
    initialize_ddp()
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(SIZES)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=CAP / 2**20)
    log: list[list[int]] = []
    model.register_comm_hook(
        lambda bucket: log.append([parameter.nbytes for parameter in bucket.parameters()]),
        note_and_reduce,
    )
    for _ in range(2):  # the second step has the final buckets
        log.clear()
        model(torch.ones(2, SIZES[0])).sum().backward()
    sizes = [size for bucket in log for size in bucket]  # in the order in which they came
    sizes_of_small, cap = SMALL
    small = assign_buckets(list(sizes_of_small), cap)
    return sizes, log, assign_buckets(list(sizes), CAP), small


def _judge_buckets(seen):
    sizes, log, answer, small = seen[0]
    numbers = iter(range(len(sizes)))
    want = [[next(numbers) for _ in bucket] for bucket in log]
    try:
        got = [list(bucket) for bucket in answer]
    except TypeError:
        kind = type(answer).__name__
        return f"Your function returned {kind}, not a list of lists of indices into `sizes`."
    flat = list(chain(*got))
    if got == want:
        right = [list(bucket) for bucket in small] == [[0, 1], [2, 3], [4, 5, 6]]
        if right:
            return None
        return (
            f"It is right for DDP's gradients, but of the sizes {SMALL[0]}, with a cap of 10, you "
            f"made {small}. A bucket is full when its gradients together have reached the cap; "
            "add up the sizes that are already in it."
        )
    if sorted(flat) != list(range(len(sizes))):
        placed = len(set(flat) & set(range(len(sizes))))
        return (
            f"Only {placed} of {len(sizes)} gradients have a bucket. The last bucket is sent as "
            "well, even if it never gets full."
        )
    if flat != list(range(len(sizes))):
        return (
            "The gradients are in another order than `sizes`. What is ready first belongs into the "
            "first bucket, so that it can be sent first."
        )
    if [] in got:
        return "A bucket is empty. Open a bucket when a gradient needs it, not when one is full."
    totals = [sum(sizes[number] for number in bucket) for bucket in got]
    if all(total <= CAP or len(bucket) == 1 for total, bucket in zip(totals, got, strict=True)):
        return (
            f"Your buckets never exceed {CAP} bytes: you made {len(got)} of them, and DDP "
            f"{len(want)}. DDP does not look ahead. It adds a gradient, and closes the bucket if "
            "the bucket has now reached the cap."
        )
    return (
        f"DDP made {len(want)} buckets of these gradients, and you made {len(got)}. Close a bucket "
        "as soon as its sizes add up to the cap or more."
    )


EXERCISES = {"assign_buckets": Exercise(_buckets, _judge_buckets)}
