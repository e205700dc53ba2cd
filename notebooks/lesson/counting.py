"""How many collectives some work takes, as the profiler saw them."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity


def count_all_reduces(work: Callable[[], object]) -> int:
    """Return how many all-reduces of gloo ran on this rank during `work`, DDP's own included."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        work()
    return sum(event.name == "gloo:all_reduce" for event in profile.events())
