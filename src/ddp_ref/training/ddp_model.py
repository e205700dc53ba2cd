"""Each rank's copy of the model: wrapped in DistributedDataParallel (DDP)."""

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..randomness import generator_state, set_generator_state


def wrap_model(model: nn.Module, device: torch.device, **ddp_options: Any) -> nn.Module:
    """Move `model` to `device`, and wrap it in DDP if a process group is open (collective).

    Args:
        model: The model, not yet wrapped in DDP; it may be compiled.
        device: This rank's device, `initialize_ddp().device`.
        **ddp_options: Keywords of DistributedDataParallel. Without `find_unused_parameters`, the
            environment variable DDP_FIND_UNUSED_PARAMETERS decides: 1, true, 0 or false.

    Returns:
        The wrapped model; without a group, or without a trainable parameter, the model itself.

    Raises:
        ValueError: If the model already contains DDP.
        TypeError: If DistributedDataParallel has no such keyword.
    """
    distributed = dist.is_available() and dist.is_initialized()
    return move_and_wrap(model, device, ddp_options, distributed)


def move_and_wrap(
    model: nn.Module, device: torch.device, ddp_options: Mapping[str, Any], distributed: bool
) -> nn.Module:
    """Do what `wrap_model` does. One process checks the model and the keywords, too."""
    known = inspect.signature(DistributedDataParallel).parameters.keys() - {"module", "device_ids"}
    if unknown := ", ".join(ddp_options.keys() - known):
        raise TypeError(f"ddp_options may not have {unknown}: use {', '.join(sorted(known))}")
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ValueError("the model is already wrapped in DDP: pass the model inside it")
    model = model.to(device)
    if not distributed or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    options = {"find_unused_parameters": _switch(), **ddp_options}
    device_ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, **options)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile."""
    wraps = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
    inner = getattr(model, wraps, None)
    return unwrap_model(inner) if isinstance(inner, nn.Module) else model


def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
    """Return a context in which DDP averages gradients only if `enabled`."""
    if enabled or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def warm_up_ddp_buckets(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Run one forward and backward pass so that a new DDP builds its final buckets; undo the rest.

    DDP rebuilds its buckets after the first backward pass. On three ranks or more the buckets
    decide in which order gradients are summed, so without this pass a resumed run would differ
    from the uninterrupted one in the last bits.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    device = next(model.parameters()).device
    rng_state, buffers = generator_state(device), copied_buffers(model)
    loss().backward()
    model.zero_grad()
    restore_buffers(buffers)
    set_generator_state(rng_state, device)


def copied_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return each buffer's module, name and copy: a forward pass may change it, as in BatchNorm."""
    own = [(m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    return [(module, name, buffer.clone()) for module, name, buffer in own]


def restore_buffers(copies: list[tuple[nn.Module, str, Tensor]]) -> None:
    """Set the buffers back to their copies, except a cache that has grown meanwhile."""
    for module, name, before in copies:
        if (buffer := getattr(module, name)).shape == before.shape:
            buffer.copy_(before)


def _switch(name: str = "DDP_FIND_UNUSED_PARAMETERS") -> bool:
    value = os.environ.get(name, "").lower()
    if value not in ("", "0", "false", "1", "true"):
        raise ValueError(f"{name} must be 1, 0, true or false, not {value!r}")
    return value in ("1", "true")
