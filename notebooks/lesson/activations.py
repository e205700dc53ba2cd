"""What a step under DDP saves for its backward pass, recomputes, and sends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from .buckets import note_and_reduce
from .palette import MEMORY

HATCHES = {"weights": "", "gradients": "//", "buckets": "xx", "optimizer": "..", "activations": ""}


class Watch:
    """Watch a GPT in DDP.

    peak: the most bytes that one backward pass needed saved, without the weights themselves.
    passes: how many forward passes the first block has run.
    sent: the dtype of each bucket that DDP reduced.
    """

    def __init__(self, net: DDP) -> None:
        self.peak, self.passes = 0, 0
        self.sent: list[torch.dtype] = []
        self._weights = {weight.untyped_storage().data_ptr() for weight in net.parameters()}
        net.module.blocks[0].qkv.register_forward_hook(self._count)
        net.register_comm_hook(
            lambda bucket: self.sent.append(bucket.buffer().dtype), note_and_reduce
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count what is saved for backward in here; a storage that is saved twice counts once."""
        saved: dict[int, int] = {}

        def look(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(look, lambda tensor: tensor):
            yield
        self.peak = max(self.peak, sum(saved.values()))

    def _count(self, *_: object) -> None:
        self.passes += 1


def draw_step_memory(cases: dict[str, dict[str, float]]) -> Figure:
    """Draw a bar for each case, made of its kinds of memory in bytes per weight."""
    figure, axes = plt.subplots(figsize=(8, 3))
    left = dict.fromkeys(cases, 0.0)
    for kind, hatch in HATCHES.items():
        sizes = [sizes[kind] for sizes in cases.values()]
        look: dict[str, Any] = {
            "color": MEMORY[kind],
            "hatch": hatch,
            "edgecolor": "white",
            "label": kind,
        }
        axes.barh(list(cases), sizes, left=list(left.values()), **look)
        left = {case: left[case] + size for case, size in zip(cases, sizes, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("bytes per weight, on one rank, when backward begins")
    figure.legend(loc="lower center", ncols=5, fontsize="small", bbox_to_anchor=(0.5, -0.08))
    figure.tight_layout()
    return figure
