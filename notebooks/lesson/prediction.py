"""What the cost model needs to predict a step of DDP, measured, and the step itself."""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .cost_model import fit_link

SIZES = [2**k for k in range(10, 26)]  # bytes


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


def measure_step(samples: int, bucket_mib: float) -> dict[str, float]:
    """Time a step of an MLP with 1.6 million parameters, without DDP and with it (collective).

    While a rank computes, the other one computes as well, in both cases. The fastest of 200 steps
    counts, because other programs can only make a step slower. It returns the arguments of
    `predict_step` by name, and "measured": the seconds of DDP's step.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link = fit_link(time_all_reduces(SIZES), dist.get_world_size())
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512, bias=False), nn.ReLU())]
    plain, inputs = nn.Sequential(*layers), torch.randn(samples, 512)
    replica = DDP(deepcopy(plain), bucket_cap_mb=bucket_mib)
    models = {model: torch.optim.SGD(model.parameters(), lr=1e-3) for model in (plain, replica)}

    def loss_of(model: nn.Module) -> Tensor:
        return model(inputs).square().mean()

    for _ in range(3):  # DDP arranges its buckets, and memory is allocated
        for model, optimizer in models.items():
            time_step(optimizer, loss_of, model)
    rounds = torch.tensor(  # (200, model, part of the step)
        [[time_step(each, loss_of, model) for model, each in models.items()] for _ in range(200)]
    )
    dist.all_reduce(rounds, dist.ReduceOp.MAX)  # a step lasts as long as that of the slowest rank
    alone, together = (min(times, key=sum) for times in rounds.transpose(0, 1).tolist())
    forward, backward = alone
    return {
        "forward": forward,
        "backward": backward,
        "payload": sum(weight.nbytes for weight in plain.parameters()),
        "bucket_bytes": bucket_mib * 2**20,
        "world_size": dist.get_world_size(),
        "bandwidth": link.bandwidth,
        "latency": link.latency,
        "measured": sum(together),
    }
