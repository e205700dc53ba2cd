"""What a rank holds between two steps, in bytes a weight, by the strategy of the training."""

from collections.abc import Callable, Iterable
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from .memory import count_bytes, keep_buckets

LOOKS = {
    "parameters": ("tab:blue", ""),
    "gradients": ("tab:orange", "//"),
    "buckets": ("lightgrey", "xx"),
    "Adam's state": ("tab:cyan", ".."),
}


def train_and_measure(
    net: nn.Module, optimizer: Any, batches: Iterable[Any], loss_of: Callable[..., Tensor]
) -> tuple[dict[str, float], float, Tensor]:
    """Train on `batches`; return what this rank then holds, what was whole, and the weights.

    The first is in bytes a weight; the second is the largest part of all weights that was not
    sharded at one time of the forward pass. Collective: all ranks call it.
    """
    weights = list(net.parameters())
    buckets = keep_buckets(net) if isinstance(net, DDP) else {}
    count = sum(weight.numel() for weight in weights)
    whole = [0.0]

    def look(*_: object) -> None:
        whole.append(sum(w.numel() for w in net.parameters() if not isinstance(w, DTensor)) / count)

    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    # A ZeroRedundancyOptimizer wraps one that has this rank's part of the state.
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    kinds = {
        "parameters": net.parameters(),
        "gradients": [w.grad for w in net.parameters() if w.grad is not None],
        "buckets": buckets.values(),
        "Adam's state": [tensor for state in inner.state.values() for tensor in state.values()],
    }
    full = [w.full_tensor() if isinstance(w, DTensor) else w for w in net.parameters()]
    flat = torch.cat([weight.detach().flatten() for weight in full])
    held = count_bytes({kind: list(map(_local, kinds[kind])) for kind in LOOKS})
    return {kind: size / count for kind, size in held.items()}, max(whole), flat


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def draw_states(
    held: dict[int, dict[str, dict[str, float]]], predict: Callable[[str, int], float]
) -> Figure:
    """Draw what one rank holds, `held[ranks][strategy][kind]`, beside what was predicted.

    Left the kinds at the smallest number of ranks; right the sums, and predict(strategy, ranks).
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=[3, 2])
    few = held[min(held)]
    bottom = [0.0] * len(few)
    for kind, (color, hatch) in LOOKS.items():
        sizes = [kinds[kind] for kinds in few.values()]
        look = {"color": color, "hatch": hatch, "edgecolor": "white", "label": kind}
        left.bar(list(few), sizes, 0.6, bottom, **look)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    predicted = [predict(name, min(held)) for name in few]
    left.plot(list(few), predicted, "kD", markersize=5, label="predicted sum")
    left.set(title=f"{min(held)} ranks", ylabel="bytes a weight, on one rank", ylim=(0, 30))
    left.legend(ncols=2, fontsize="small", loc="upper right")
    worlds = [1, 2, 4, 8, 16, 32, 64]
    for name, style, marker in zip(few, ("-", "--", "-.", ":"), "oXs^", strict=True):
        (line,) = right.plot(worlds, [predict(name, n) for n in worlds], style, label=name)
        sums = [sum(strategies[name].values()) for strategies in held.values()]
        right.plot(list(held), sums, marker, color=line.get_color())
    right.set_xscale("log", base=2)
    right.set_xticks(worlds, [str(n) for n in worlds])
    right.set(title="lines: predicted, marks: measured", xlabel="ranks", ylim=(0, 30))
    right.legend(ncols=2, fontsize="small", loc="upper right")
    figure.tight_layout()
    return figure
