"""The memory of a rank: whose bytes they are."""

from functools import partial

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from .buckets import note_and_reduce
from .palette import MEMORY

HATCHES = ("", "//", "xx", "..", "\\\\")
KEYS = {"parameters": "weights", "optimizer state": "optimizer"}  # their names in the palette


def bytes_held(model: nn.Module, as_view: bool, batch: int) -> dict[str, int]:
    """Return the bytes of each kind after a step with AdamW on inputs (batch, 1024), in DDP."""
    saved: list[Tensor] = []
    replica = DDP(model, gradient_as_bucket_view=as_view)
    buckets = keep_buckets(replica)
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
    return count_bytes(kinds)


def _keep(saved: list[Tensor], tensor: Tensor) -> Tensor:
    """Keep what autograd saves for backward; it gets the tensor itself."""
    saved.append(tensor)
    return tensor


def keep_buckets(model: DDP) -> dict[int, Tensor]:
    """Return a dict that from now on holds the newest buffer of each of the model's buckets."""
    buckets: dict[int, Tensor] = {}
    model.register_comm_hook(
        lambda bucket: buckets.update({bucket.index(): bucket.buffer()}), note_and_reduce
    )
    return buckets


def count_bytes(kinds: dict[str, list[Tensor]]) -> dict[str, int]:
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
        color = MEMORY[KEYS.get(group, group)]
        sizes = [counted[group] / 2**20 for counted in cases.values()]
        bars = axes.barh(list(cases), sizes, left=left, label=group, color=color)
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
