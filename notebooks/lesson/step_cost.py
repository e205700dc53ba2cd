"""What a training step costs, one way beside another."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref.launch import available_cores

from .buckets import note_and_reduce
from .palette import COMMUNICATE, COMPUTE
from .timing import fastest


def step_seconds(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> float:
    """Return the seconds of the fastest of 200 training steps.

    Forward and backward run inside `around()`, such as DDP's no_sync.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        with around():
            F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return fastest(step, 200)


def one_process_cost(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the seconds of a step in three ways without DDP, by name: 64 samples, and 32."""
    torch.set_num_threads(1)
    whole = step_seconds(model, inputs, targets)
    half = step_seconds(model, inputs[:32], targets[:32])
    torch.set_num_threads(available_cores())
    cores = step_seconds(model, inputs, targets)
    return {"1 x 64, one thread": whole, "1 x 32, one thread": half, "1 x 64, all cores": cores}


def rank_cost(
    model: nn.Module, inputs: Tensor, targets: Tensor
) -> tuple[float, float, dict[int, int]]:
    """Return the seconds of a step on this rank, without the all-reduce and with it, and bytes.

    The bytes of gradients that DDP reduces in a step, by batch size: that of `inputs`, and 3.
    Collective: all ranks call it.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replica = DDP(model)
    alone = step_seconds(replica, inputs, targets, replica.no_sync)
    together = step_seconds(replica, inputs, targets)
    sizes: list[int] = []
    replica.register_comm_hook(  # after the timing: it costs time itself
        lambda bucket: sizes.append(bucket.buffer().nbytes), note_and_reduce
    )
    sent = {}
    for batch in (len(inputs), 3):
        sizes.clear()
        F.cross_entropy(replica(inputs[:batch]), targets[:batch]).backward()
        sent[batch] = sum(sizes)
    return alone, together, sent


def draw_step_cost(seconds: dict[str, float]) -> Figure:
    """Draw a bar for each way of taking a step, in milliseconds; hatched where it all-reduces."""
    return draw_bars(seconds, "milliseconds per step (the fastest of 200)", sends="DDP")


def draw_bars(seconds: dict[str, float], label: str, sends: str = "") -> Figure:
    """Draw a bar for each name, in milliseconds; hatched if the name ends with `sends`."""
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(seconds) + 0.6))
    for name, value in seconds.items():
        color, hatch = (COMMUNICATE, "//") if name.endswith(sends) else (COMPUTE, "")
        bar = axes.barh(name, value * 1000, color=color, hatch=hatch, edgecolor="white")
        axes.bar_label(bar, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.12)
    figure.tight_layout()
    return figure
