"""The model as each rank trains it: a replica in DistributedDataParallel."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(
    model: nn.Module, device: torch.device, distributed: bool, find_unused: bool | None
) -> nn.Module:
    """Return `model` on `device`, wrapped in DDP where there are ranks and it has what to train.

    `find_unused` is DDP's find_unused_parameters; None: DDP_FIND_UNUSED_PARAMETERS says it, 1 or 0.
    Raises ValueError where DDP is in the model already.
    """
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ValueError("the model is wrapped in DDP already: give Handler the model inside")
    model = model.to(device)
    if not distributed or not any(part.requires_grad for part in model.parameters()):
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        find_unused_parameters=_switch() if find_unused is None else find_unused,
    )


def reducing(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Let DDP reduce the gradients in the `last` backward of a step only."""
    if last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def _switch(name: str = "DDP_FIND_UNUSED_PARAMETERS") -> bool:
    value = os.environ.get(name, "").lower()
    if value not in ("", "0", "false", "1", "true"):
        raise ValueError(f"{name} must be 1, 0, true or false, not {value!r}")
    return value in ("1", "true")
