"""Each rank's copy of the model: wrapped in DistributedDataParallel (DDP)."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrap_model(
    model: nn.Module, device: torch.device, distributed: bool, find_unused: bool | None
) -> nn.Module:
    """Move `model` to `device` and wrap it in DDP (collective if `distributed`).

    Args:
        model: The model, not yet wrapped in DDP.
        device: Where it trains.
        distributed: Whether there are other ranks.
        find_unused: DDP's `find_unused_parameters`. With None, the environment variable
            DDP_FIND_UNUSED_PARAMETERS decides: 1, true, 0 or false.

    Returns:
        The wrapped model; on one process, or without a trainable parameter, the model itself.

    Raises:
        ValueError: If the model already contains DDP.
    """
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ValueError("the model is already wrapped in DDP: give Handler the model inside it")
    model = model.to(device)
    if not distributed or not any(part.requires_grad for part in model.parameters()):
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        find_unused_parameters=_switch() if find_unused is None else find_unused,
    )


def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
    """Return a context in which DDP averages gradients only if `enabled`."""
    if enabled or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def _switch(name: str = "DDP_FIND_UNUSED_PARAMETERS") -> bool:
    value = os.environ.get(name, "").lower()
    if value not in ("", "0", "false", "1", "true"):
        raise ValueError(f"{name} must be 1, 0, true or false, not {value!r}")
    return value in ("1", "true")
