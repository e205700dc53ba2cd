"""The memory of a rank: whose bytes they are."""

from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

DEFAULT_GROUP: Any = None  # allreduce_hook takes it, but does not say so in its types
HATCHES = ("", "//", "xx", "..", "\\\\")


def bytes_held(model: nn.Module, as_view: bool, batch: int) -> dict[str, int]:
    """Return the bytes of each kind after a step with AdamW on inputs (batch, 1024), in DDP."""
    buckets: dict[int, Tensor] = {}
    saved: list[Tensor] = []
    replica = DDP(model, gradient_as_bucket_view=as_view)
    replica.register_comm_hook(buckets, _keep_and_reduce)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the second step has the final buckets
        saved.clear()
        buckets.clear()
        optimizer.zero_grad()
        with saved_tensors_hooks(partial(_keep, saved), lambda tensor: tensor):
            loss = replica(torch.randn(batch, 1024)).sum()
        loss.backward()
        optimizer.step()
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    kinds: dict[str, list[Tensor]] = {
        "parameters": list(model.parameters()),
        "gradients": gradients,
    }
    kinds |= {"buckets": list(buckets.values()), "optimizer state": state, "activations": saved}
    return _count_bytes(kinds)


def _keep(saved: list[Tensor], tensor: Tensor) -> Tensor:
    """Keep what autograd saves for backward; it gets the tensor itself."""
    saved.append(tensor)
    return tensor


def _keep_and_reduce(buckets, bucket):
    buckets[bucket.index()] = bucket.buffer()
    return allreduce_hook(DEFAULT_GROUP, bucket)


def _count_bytes(kinds: dict[str, list[Tensor]]) -> dict[str, int]:
    """Return each kind's bytes; a storage that several share counts for the first alone."""
    seen: set[int] = set()
    counted = {}
    for kind, tensors in kinds.items():
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        counted[kind] = sum(s.nbytes() for address, s in storages.items() if address not in seen)
        seen |= storages.keys()
    return counted


def draw_memory(cases: dict[str, dict[str, int]]) -> Figure:
    """Draw a bar a case, made of its groups, in MiB."""
    figure, axes = plt.subplots(figsize=(8, 3.2))
    left = [0.0] * len(cases)
    for number, group in enumerate(next(iter(cases.values()))):
        sizes = [counted[group] / 2**20 for counted in cases.values()]
        bars = axes.barh(list(cases), sizes, left=left, label=group, color=f"C{number}")
        for bar in bars:
            bar.set(hatch=HATCHES[number], edgecolor="white")
        labels = [f"{size:.0f}" if size >= 5 else "" for size in sizes]
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.bar_label(bars, labels, label_type="center", bbox=box)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("MiB on one rank")
    figure.legend(loc="lower center", ncols=3, bbox_to_anchor=(0.5, -0.14))
    figure.tight_layout()
    return figure
