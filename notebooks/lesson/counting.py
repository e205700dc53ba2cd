"""How many collectives some work takes, as the profiler saw them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader, DistributedSampler

from datautils import MyTrainDataset


def count_collectives(work: Callable[..., object], *args: Any) -> int:
    """Return how many collectives `work(*args)` took on this rank, DDP's own included.

    Broadcasts are not counted: DDP has two of them, about its buckets, whatever the steps.
    """
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        work(*args)
    counted = ("gloo:all_reduce", "gloo:all_gather", "nccl:all_reduce", "nccl:_all_gather_base")
    return sum(event.name in counted for event in profile.events())


def plain_loop(reduce_loss: bool) -> Callable[[], None]:
    """Return what trains for an epoch of the digits; with `reduce_loss` it all-reduces each loss.

    The model is made now: DDP compares the ranks' models, and makes them equal, in collectives.
    """
    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    model = DDP(torch.nn.Linear(64, 10).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = MyTrainDataset()

    def epoch() -> None:
        for inputs, targets in DataLoader(data, 32, sampler=DistributedSampler(data)):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            if reduce_loss:
                dist.all_reduce(loss.detach())

    return epoch
