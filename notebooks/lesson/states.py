"""What a rank holds between two steps, in bytes per weight, for each training strategy."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from .memory import count_bytes, keep_buckets
from .palette import MEMORY, REFERENCE

KINDS = {"weights": "", "gradients": "//", "buckets": "xx", "optimizer": ".."}  # name: hatch


class Held(NamedTuple):
    """What one rank held after training."""

    bytes_per_weight: dict[str, float]  # by kind
    largest_whole: float  # the largest share of all weights that was not sharded at one time
    weights: Tensor  # all weights of the model in one vector, (weights,)


def train_and_measure(
    net: nn.Module, optimizer: Any, batches: Iterable[Any], loss_of: Callable[..., Tensor]
) -> Held:
    """Train on `batches` and return what this rank then holds (collective: all ranks call)."""
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
    # A ZeroRedundancyOptimizer wraps an optimizer that holds this rank's part of the state.
    inner = getattr(optimizer, "optim", optimizer)
    kinds = {
        "weights": net.parameters(),
        "gradients": [w.grad for w in net.parameters() if w.grad is not None],
        "buckets": buckets.values(),
        "optimizer": [tensor for state in inner.state.values() for tensor in state.values()],
    }
    held = count_bytes({kind: list(map(local, kinds[kind])) for kind in KINDS})
    per_weight = {kind: size / count for kind, size in held.items()}
    return Held(per_weight, max(whole), whole_vector(net.parameters()))


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_vector(tensors: Iterable[Tensor]) -> Tensor:
    """Return all elements in one vector on the CPU; shards are gathered (collective)."""
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in full]).cpu()


def draw_states(
    held: dict[int, dict[str, dict[str, float]]], predict: Callable[[str, int], float]
) -> Figure:
    """Draw what one rank holds, `held[ranks][strategy][kind]`, beside the prediction.

    Left: the kinds, at the smallest number of ranks. Right: the sums, and predict(strategy, ranks).
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=[1, 1])
    few = held[min(held)]
    names = [name.replace(", ", ",\n") for name in few]
    bottom = [0.0] * len(few)
    for kind, hatch in KINDS.items():
        sizes = [kinds[kind] for kinds in few.values()]
        look = {"color": MEMORY[kind], "hatch": hatch, "edgecolor": "white", "label": kind}
        left.bar(names, sizes, 0.6, bottom, **look)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    left.set(title=f"{min(held)} ranks", ylabel="bytes per weight, on one rank", ylim=(0, 27))
    left.legend(ncols=2, fontsize="small", loc="upper right")
    worlds = [1, 2, 4, 8, 16, 32, 64]
    for name, style, marker in zip(few, ("-", "--", "-.", ":"), "oXs^", strict=True):
        predicted = [predict(name, n) for n in worlds]
        right.plot(worlds, predicted, style, color=REFERENCE)
        sums = [sum(strategies[name].values()) for strategies in held.values()]
        right.plot(list(held), sums, marker, color=REFERENCE)
        right.text(90, predicted[-1], name, va="center", fontsize="small")
    right.set_xscale("log", base=2)
    right.set_xticks(worlds, [str(n) for n in worlds])
    right.set(title="lines: predicted, marks: measured", xlabel="ranks", ylim=(-1, 27))
    figure.tight_layout()
    return figure
