"""How many collectives some work takes, as the profiler saw them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader, DistributedSampler

from datautils import digits


def count_all_reduces(work: Callable[..., object], *args: Any) -> int:
    """Return how many all-reduces of gloo `work(*args)` took on this rank, DDP's own included."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        work(*args)
    return sum(event.name == "gloo:all_reduce" for event in profile.events())


def plain_epoch(reduce_loss: bool) -> None:
    """Train for an epoch of the digits; with `reduce_loss` each step also all-reduces its loss."""
    model = DDP(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = digits("train")
    for inputs, targets in DataLoader(data, 32, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if reduce_loss:
            dist.all_reduce(loss.detach())
