"""Speed: how gradients are divided into buckets, and the slowest network that still hides."""

import math
from itertools import pairwise

import torch
from lesson import Exercise
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import initialize_ddp

WIDTHS = (64, 64, 192, 64, 8)
CAP = 20_000  # bytes
SMALL = [4, 6, 2, 8, 1, 1, 1], 10  # none reaches the cap alone, and the first two are just 10


def _note_and_reduce(buckets, bucket):
    buckets.append([parameter.nbytes for parameter in bucket.parameters()])
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks


def _buckets(assign_buckets):
    """Return DDP's buckets, as the bytes of their gradients, and the function's, as indices."""
    initialize_ddp()
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(WIDTHS)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=CAP / 2**20)
    buckets: list[list[int]] = []
    model.register_comm_hook(buckets, _note_and_reduce)
    for _ in range(2):  # the second step has the final buckets
        buckets.clear()
        model(torch.ones(2, WIDTHS[0])).sum().backward()
    answer = assign_buckets([size for bucket in buckets for size in bucket], CAP)
    return buckets, answer, assign_buckets(list(SMALL[0]), SMALL[1])


def _judge_buckets(seen):
    buckets, answer, small = seen[0]
    sizes = [size for bucket in buckets for size in bucket]
    numbers = iter(range(len(sizes)))
    want = [[next(numbers) for _ in bucket] for bucket in buckets]
    try:
        got = [list(bucket) for bucket in answer]
    except TypeError:
        kind = type(answer).__name__
        return f"Your function returned {kind}, not a list of lists of indices into `sizes`."
    flat = [number for bucket in got for number in bucket]
    if got == want:
        if [list(bucket) for bucket in small] == [[0, 1], [2, 3], [4, 5, 6]]:
            return None
        return (
            f"It is right for DDP's gradients, but of the sizes {SMALL[0]}, with a cap of 10, you "
            f"made {small}. A bucket is full when its gradients together have reached the cap, so "
            "add up the sizes that are already in it."
        )
    if sorted(flat) != list(range(len(sizes))):
        placed = len(set(flat) & set(range(len(sizes))))
        return (
            f"Only {placed} of {len(sizes)} gradients have a bucket, or some have two. DDP also "
            "sends the last bucket, even if it never gets full."
        )
    if flat != list(range(len(sizes))):
        return (
            "The gradients are in another order than `sizes`. What is ready first belongs into the "
            "first bucket, so that it can be sent first."
        )
    if [] in got:
        return "A bucket is empty. Open a bucket when a gradient needs it, not when one is full."
    if all(len(bucket) == 1 or sum(sizes[n] for n in bucket) <= CAP for bucket in got):
        return (
            f"Your buckets never exceed {CAP} bytes: you made {len(got)} of them, and DDP "
            f"{len(want)}. DDP does not look ahead. It adds a gradient, and closes the bucket if "
            "the bucket has now reached the cap."
        )
    return (
        f"DDP made {len(want)} buckets of these gradients, and you made {len(got)}. Close a bucket "
        "as soon as its sizes add up to the cap or more."
    )


# (parameters, world size, seconds of backward)
CASES = [(100e6, 8, 0.2), (100e6, 2, 0.2), (7e6, 16, 0.01)]
SMALLER_CHUNKS = (
    "The answer grows with the number of ranks. In the ring, more ranks cut the tensor into "
    "smaller chunks, so"
)
# What a slip multiplies the answer by, for n ranks, and its hint.
SLIPS = [
    (
        lambda n: 1 / 2,
        "The answer is half of what is needed. An all-reduce goes round the ring twice: once to "
        "add up (reduce-scatter) and once to hand out the sums (all-gather).",
    ),
    (
        lambda n: 1 / 8,
        "The answer is an eighth of what is needed, which looks like gigabytes per second. "
        "Networks are sold in gigabits per second, and a byte has 8 bits.",
    ),
    (
        lambda n: 1 / 4,
        "The answer is a quarter of what is needed, as if a gradient had one byte. In fp32, each "
        "number takes 4 bytes.",
    ),
    (
        lambda n: n * n / (n - 1),
        f"{SMALLER_CHUNKS} a rank sends (n - 1) / n of it in each phase, not n times it.",
    ),
    (
        lambda n: n,
        f"{SMALLER_CHUNKS} in each of the 2 (n - 1) steps, a rank sends only 1/n of it.",
    ),
    (
        lambda n: n / (n - 1),
        "The answer is a little too high, most of all for 2 ranks. In each phase, a rank sends all "
        "chunks but one, which is (n - 1) / n of the tensor.",
    ),
]


def _ask_for_gigabits(break_even_gigabits):
    return [break_even_gigabits(*case) for case in CASES]


def _judge_gigabits(seen):
    wanted = [8 * 4 * count * 2 * (n - 1) / n / seconds / 1e9 for count, n, seconds in CASES]
    ratios = [answer / want for answer, want in zip(seen[0], wanted, strict=True)]

    def is_off_by(factors):
        return all(map(lambda r, f: math.isclose(r, f, rel_tol=1e-3), ratios, factors))

    if is_off_by([1, 1, 1]):
        return None
    for slip, hint in SLIPS:
        if is_off_by([slip(n) for _, n, _ in CASES]):
            return hint
    return (
        f"For 100 million parameters, 8 ranks and 0.2 s of backward, your function returned "
        f"{seen[0][0]:.4g} Gbit/s, and {wanted[0]:.4g} are needed. First write down the bytes that "
        "a rank sends, then divide by the time."
    )


EXERCISES = {
    "assign_buckets": Exercise(_buckets, _judge_buckets),
    "break_even_gigabits": Exercise(_ask_for_gigabits, _judge_gigabits, nproc=0),
}
