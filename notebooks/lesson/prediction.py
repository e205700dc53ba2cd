"""What the cost model needs to predict a step, measured."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def time_all_reduces(sizes: Sequence[int]) -> dict[float, float]:
    """Return the seconds of the fastest of 25 all-reduces of each size (collective)."""
    payloads, seconds = [torch.zeros(size // 4) for size in sizes], []
    for payload in 25 * payloads:  # all sizes in turn, 25 times
        dist.barrier()  # start together, or the earlier rank would time its wait as well
        start = time.perf_counter()
        dist.all_reduce(payload)
        seconds.append(time.perf_counter() - start)
    return {size: min(seconds[n :: len(sizes)]) for n, size in enumerate(sizes)}


def time_step(optimizer: Any, loss_of: Callable[..., Tensor], *args: Any) -> tuple[float, float]:
    """Return the seconds of forward with the optimizer's step, and of backward (collective)."""
    dist.barrier()
    times = [time.perf_counter()]
    loss = loss_of(*args)
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    return times[1] - times[0] + times[3] - times[2], times[2] - times[1]
