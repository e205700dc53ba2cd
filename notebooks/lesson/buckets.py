"""A communication hook for DDP that looks at each bucket before it is reduced.

`model.register_comm_hook(note, note_and_reduce)` calls `note(bucket)`.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future


def note_and_reduce(
    note: Callable[[dist.GradBucket], object], bucket: dist.GradBucket
) -> Future[Tensor]:
    """Call `note(bucket)`, then reduce the bucket as DDP does without a hook."""
    note(bucket)
    return allreduce_hook(None, bucket)  # type: ignore[arg-type] # None: the default group
