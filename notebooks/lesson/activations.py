"""What a step under DDP saves for its backward pass, computes again, and sends."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from .buckets import note_and_reduce


class Watch:
    """Watch a GPT in DDP.

    peak: the most bytes that were saved for a backward pass, without the weights themselves.
    passes: how often the first block has computed. sent: the type of each bucket reduced.
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
