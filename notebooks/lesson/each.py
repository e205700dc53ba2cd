"""One launch of the ranks for several runs of a function."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def for_each(function: Callable[[Any], Any], *values: Any) -> list[Any]:
    """Return `function(value)` for each value, on this rank, with one thread, in an open group.

    Each call begins with the same random numbers, on all ranks.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()  # all are connected, whatever the function does
    results = []
    for value in values:
        torch.manual_seed(0)
        results.append(function(value))
    return results
