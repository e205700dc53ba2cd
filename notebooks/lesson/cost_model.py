"""What a step costs in bytes, seconds and memory: plain arithmetic, no torch.

`docs/planner/model.js` has the same formulas under the same names, for the page "Plan a run", and
some more.

Units everywhere: bytes, seconds and bytes a second.
A network's speed in gigabits goes through `bytes_per_second` first: 8 bits are a byte.
The same names everywhere:

payload: bytes on each rank, of all buckets together.
world_size: ranks, n.
bandwidth: bytes a second out of each rank, in one direction (the "bus bandwidth" of [nccl]).
latency: what an all-reduce of nothing takes. For a ring it grows with the ranks:
    `ring_steps(world_size)` times the delay of one step.
all_reduce: the time of all buckets' all-reduces together.
backward: the time of backward alone.
strategy: one of STRATEGIES.

Sources of the formulas:

[nccl] NVIDIA, "Performance reported by NCCL tests",
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
[ring] Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69 (2009)
[ddp] Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    VLDB 2020, https://arxiv.org/abs/2006.15704
[zero] Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC 2020, https://arxiv.org/abs/1910.02054
[fsdp] `fully_shard`, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
[hooks] `bf16_compress_hook`, https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

import math
from typing import NamedTuple


class Link(NamedTuple):
    """How long an empty all-reduce takes, in seconds, and the bus bandwidth of [nccl]."""

    latency: float
    bandwidth: float


class Precision(NamedTuple):
    """How many bytes a number has.

    weights: in memory; the gradients and the optimizer's state have the weights' type.
    gathered: when FSDP2 gathers the weights. reduced: when the gradients are averaged.
    """

    weights: int
    gathered: int
    reduced: int


class Step(NamedTuple):
    """What `predict_step` predicts for a step of DDP.

    buckets: how many. all_reduce: seconds of all buckets together. exposed: the seconds of them
    after backward. seconds: the whole step. efficiency: the share of the step that computes.
    """

    buckets: int
    all_reduce: float
    exposed: float
    seconds: float
    efficiency: float


# Autocast keeps weights and gradients in fp32. FSDP2 has MixedPrecisionPolicy instead, which
# also gathers in bf16 [fsdp]. The hook of DDP [hooks], or FSDP2's reduce_dtype, averages in bf16.
PRECISIONS = {
    "fp32": Precision(4, 4, 4),
    "bf16 autocast": Precision(4, 2, 4),
    "bf16 autocast, reduce in bf16": Precision(4, 2, 2),
    "all bf16": Precision(2, 2, 2),
}
STRATEGIES = ("DDP", "DDP, bucket view", "ZeRO-1", "ZeRO-2", "FSDP2")


def bytes_per_second(gigabits: float) -> float:
    """Return a network's speed in bytes a second; network vendors count bits, 10^9 to a gigabit."""
    return gigabits * 1e9 / 8


def gradient_bytes(parameters: float, bytes_per_number: int = 4) -> float:
    """Return the bytes that DDP reduces in a step: a number a parameter, of 4 bytes in fp32."""
    return parameters * bytes_per_number


def ring_steps(world_size: int) -> int:
    """Return the steps of a ring all-reduce: n - 1 to add up, n - 1 to share the sums [ring]."""
    return 2 * (world_size - 1)


def bytes_sent(payload: float, world_size: int) -> float:
    """Return the bytes that each rank sends to all-reduce `payload` bytes: 2 (n - 1) / n times it.

    A step of the ring sends a chunk, which is 1/n of the payload [ring]. No algorithm that is
    made of sends and receives needs fewer bytes [nccl]; switches that add up do (NVLink SHARP).
    """
    return ring_steps(world_size) * payload / world_size


def all_reduce_seconds(
    payload: float, world_size: int, bandwidth: float, latency: float = 0.0
) -> float:
    """Return the time of an all-reduce: latency + 2 (n - 1) / n x payload / bandwidth [nccl]."""
    return latency + bytes_sent(payload, world_size) / bandwidth


def exposed_seconds(all_reduce: float, backward: float, buckets: int) -> float:
    """Return how much of the all-reduces comes after backward has ended.

    The model: `buckets` equal buckets become ready at equal distances in backward, the last at its
    end [ddp]; they are sent one after another, and sending does not slow down computing. Either
    the network is faster, and only the last bucket is left over; or it is busy from the first
    bucket on.
    """
    last_bucket = all_reduce / buckets
    busy_from_the_first = backward / buckets + all_reduce - backward
    return max(last_bucket, busy_from_the_first)


def bucket_count(payload: float, bucket_bytes: float) -> int:
    """Return how many buckets DDP makes of `payload` bytes.

    A bucket holds whole parameters, and DDP's first bucket is smaller [ddp]. This leaves both out.
    """
    return max(1, math.ceil(payload / bucket_bytes))


def bucketed_all_reduce_seconds(
    payload: float, buckets: int, world_size: int, bandwidth: float, latency: float = 0.0
) -> float:
    """Return the time of the all-reduces of all buckets, which are equal: each pays the latency."""
    return buckets * all_reduce_seconds(payload / buckets, world_size, bandwidth, latency)


def efficiency(compute: float, exposed: float) -> float:
    """Return the share of a step that computes: 1 if all communication is hidden.

    n ranks train n x efficiency times as many samples a second as one rank, each rank with the
    same batch size.
    """
    return compute / (compute + exposed)


def predict_step(
    forward: float,
    backward: float,
    payload: float,
    bucket_bytes: float,
    world_size: int,
    bandwidth: float,
    latency: float = 0.0,
) -> Step:
    """Return the prediction for a step of DDP with buckets of `bucket_bytes`.

    `forward` is the time of all that no communication overlaps, with the optimizer's step.
    """
    buckets = bucket_count(payload, bucket_bytes)
    all_reduce = bucketed_all_reduce_seconds(payload, buckets, world_size, bandwidth, latency)
    exposed = exposed_seconds(all_reduce, backward, buckets)
    compute = forward + backward
    return Step(buckets, all_reduce, exposed, compute + exposed, efficiency(compute, exposed))


def bytes_per_parameter(
    strategy: str, world_size: int, number: int = 4, state: int = 2
) -> dict[str, float]:
    """Return what a rank holds between two steps, in bytes per parameter [zero], by kind.

    Chapter 10 measures it. Not in it: activations, and what lives only during a step, such as
    the block that FSDP2 has gathered. The DDP below ZeRO-1 has the bucket view; without it, DDP's
    buckets are a second copy of the gradients.

    number: bytes of a weight; gradients and optimizer state have the same type.
    state: numbers that the optimizer keeps for each parameter, such as 2 for Adam.
    """
    sharded = STRATEGIES.index(strategy) - 1  # how many of the kinds below, from the right
    whole = {"weights": number, "gradients": number, "buckets": 0, "optimizer": number * state}
    if strategy == "DDP":
        whole["buckets"] = number
    divided = ("optimizer", "gradients", "weights")[: max(0, sharded)]
    return {kind: n / world_size if kind in divided else n for kind, n in whole.items()}


def strategy_bytes_sent(
    strategy: str, parameters: float, world_size: int, precision: Precision
) -> float:
    """Return the bytes that each rank sends in a step, on a ring.

    A reduce-scatter or an all-gather sends (n - 1) / n of what it reduces or gathers, and an
    all-reduce is one of each. DDP all-reduces the gradients. PyTorch's ZeroRedundancyOptimizer
    (ZeRO-1) broadcasts the weights as well, which is the same on average as gathering them.
    ZeRO-2 reduce-scatters the gradients and gathers the weights [zero]. FSDP2 gathers the weights
    twice, for forward and for backward, and reduce-scatters the gradients [fsdp].
    """
    weights, gathered, reduced = precision
    per_parameter = {
        "ZeRO-1": 2 * reduced + weights,
        "ZeRO-2": reduced + weights,
        "FSDP2": 2 * gathered + reduced,
    }.get(strategy, 2 * reduced)
    return (world_size - 1) / world_size * per_parameter * parameters
