"""How fast ranks train together, beside two ideals."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref.environment import available_cores

from .palette import COMMUNICATE, COMPUTE, REFERENCE
from .timing import fastest


def measure_scaling(
    make_model: Callable[[], nn.Module], sizes: list[int]
) -> tuple[dict[int, float], float, float]:
    """Return samples a second by ranks, of one thread without DDP, and of all cores.

    The best of 3 rounds, as other programs only ever slow a run down. A rank has only the sizes in
    which it takes part. Collective: all ranks call it.
    """
    dist.init_process_group("gloo")
    rank, cores, plain = dist.get_rank(), available_cores(), make_model()
    groups = {size: dist.new_group(list(range(size))) for size in sizes}  # all ranks make all
    models = {n: DDP(make_model(), process_group=g) for n, g in groups.items() if rank < n}
    speed, one, whole = dict.fromkeys(models, 0.0), 0.0, 0.0
    for _ in range(3):
        for size, model in models.items():
            dist.barrier(groups[size])
            speed[size] = max(speed[size], size * _samples_per_second(model, 1, together=2))
        dist.barrier()
        if rank == 0:  # the others wait at the next barrier
            one = max(one, _samples_per_second(plain, 1))
            whole = max(whole, _samples_per_second(plain, cores))
        dist.barrier()
    return speed, one, whole


def _samples_per_second(model: nn.Module, threads: int, together: int = 1) -> float:
    """Return how many samples one rank trains on in a second, with 64 a step.

    So many steps are timed `together`: one step can be short on a rank whose peers are ahead of it.
    """
    torch.set_num_threads(threads)
    inputs = torch.randn(64, 1024)

    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()

    # The first is slower: DDP arranges its buckets.
    return len(inputs) / fastest(step, 8, together)


def draw_scaling(measured: dict[int, float], one_thread: float, all_cores: float) -> Figure:
    """Draw samples a second by ranks, and the ideals: copies of one thread, and the machine."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    ranks = list(measured)
    ideal = [one_thread * n for n in ranks]
    axes.plot(ranks, ideal, "--", color=REFERENCE, label="ideal 1: n times one thread")
    axes.axhline(all_cores, color=COMPUTE, linestyle=":", label="ideal 2: one process, all cores")
    ddp = list(measured.values())
    axes.plot(ranks, ddp, "o-", color=COMMUNICATE, label="measured: DDP, one thread per rank")
    axes.set(xlabel="ranks", ylabel="samples per second", xticks=ranks, ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure
