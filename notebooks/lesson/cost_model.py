"""What an all-reduce costs, and what of it hides behind backward: plain arithmetic, no torch.

Units everywhere: bytes, seconds, bytes a second, and operations (multiplications and additions).
A network's speed in gigabits goes through `bytes_per_second` first: 8 bits are a byte.

Sources of the formulas:

[nccl] NVIDIA, "Performance reported by NCCL tests",
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
[ring] Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69 (2009)
[ddp] Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    VLDB 2020, https://arxiv.org/abs/2006.15704
[flops] Kaplan et al., "Scaling Laws for Neural Language Models", section 2.1,
    https://arxiv.org/abs/2001.08361
"""

from collections.abc import Mapping
from typing import NamedTuple


class Link(NamedTuple):
    """What a fit found: how long an empty all-reduce takes, and how fast a large one is.

    latency: seconds. bandwidth: bytes a second, the bus bandwidth of [nccl].
    """

    latency: float
    bandwidth: float


def bytes_per_second(gigabits: float) -> float:
    """Return a network's speed in bytes a second; network vendors count bits, 10^9 to a gigabit."""
    return gigabits * 1e9 / 8


def gradient_bytes(parameters: float, bytes_per_number: int = 4) -> float:
    """Return the bytes that DDP reduces in a step: a number a parameter, of 4 bytes in fp32."""
    return parameters * bytes_per_number


def ring_steps(world_size: int) -> int:
    """Return the steps of a ring all-reduce: n - 1 to add up, n - 1 to hand round [ring]."""
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
    """Return the time of an all-reduce: latency + 2 (n - 1) / n x payload / bandwidth [nccl].

    Args:
        payload: Bytes on each rank.
        world_size: Ranks, n.
        bandwidth: Bytes a second out of each rank, in one direction (the "bus bandwidth").
        latency: Seconds that an all-reduce of nothing takes. For a ring it grows with the ranks:
            `ring_steps(world_size)` times the delay of one step.

    Returns:
        Seconds.
    """
    return latency + bytes_sent(payload, world_size) / bandwidth


def bus_bandwidth(payload: float, world_size: int, seconds: float) -> float:
    """Return the bus bandwidth, bytes a second, of an all-reduce that took `seconds` [nccl]."""
    return bytes_sent(payload, world_size) / seconds


def backward_seconds(parameters: float, samples: float, operations_per_second: float) -> float:
    """Return the time of backward, of a model that uses each parameter once for each sample.

    Backward takes 4 operations for each parameter and sample, forward 2 [flops]. A "sample" of a
    language model is a token. A convolution uses its parameters once for each position, so there
    the samples are positions.

    Args:
        parameters: How many.
        samples: Of one rank, in one step.
        operations_per_second: What the device reaches, not its peak.

    Returns:
        Seconds.
    """
    return 4 * parameters * samples / operations_per_second


def exposed_seconds(all_reduce: float, backward: float, buckets: int) -> float:
    """Return how much of the all-reduces comes after backward has ended.

    The model: `buckets` equal buckets become ready at equal distances in backward, the last at its
    end [ddp]; they are sent one after another, and sending does not slow down computing. Either
    the network is faster, and only the last bucket is left over; or it is busy from the first
    bucket on.

    Args:
        all_reduce: Seconds of all buckets together.
        backward: Seconds of backward alone.
        buckets: How many.

    Returns:
        Seconds.
    """
    last_bucket = all_reduce / buckets
    busy_from_the_first = backward / buckets + all_reduce - backward
    return max(last_bucket, busy_from_the_first)


def break_even_bandwidth(payload: float, world_size: int, backward: float) -> float:
    """Return the bandwidth, bytes a second, at which an all-reduce takes as long as backward.

    With anything slower it cannot hide, however many buckets there are.
    """
    return bytes_sent(payload, world_size) / backward


def fit_link(seconds: Mapping[float, float], world_size: int) -> Link:
    """Fit latency and bandwidth to measured all-reduces.

    Least squares on the relative errors, so that an error of 10 % weighs the same for a kilobyte
    as for a gigabyte.

    Args:
        seconds: The time of an all-reduce by its payload in bytes, two sizes at least.
        world_size: Ranks that took part.

    Returns:
        The link. Its latency is never negative.
    """
    points = [(bytes_sent(payload, world_size), time) for payload, time in seconds.items()]
    # Of each point the time divided by itself is 1: solve a / time + b x sent / time = 1.
    ones = [1 / time for _, time in points]
    sent = [amount / time for amount, time in points]
    aa, ab, bb = _dot(ones, ones), _dot(ones, sent), _dot(sent, sent)
    a, b = sum(ones), sum(sent)
    determinant = aa * bb - ab * ab
    latency, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    return Link(latency, 1 / per_byte)


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
