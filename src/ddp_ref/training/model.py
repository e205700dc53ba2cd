"""Each rank's copy of the model: in DistributedDataParallel (DDP), on its device, in eval mode."""

import copy
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")
FIND_UNUSED_VARIABLE = "DDP_FIND_UNUSED_PARAMETERS"


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
    """Do what `wrap_model` does. A single process checks model and keywords as well."""
    known = inspect.signature(DistributedDataParallel).parameters.keys() - {"module", "device_ids"}
    if unknown := ", ".join(ddp_options.keys() - known):
        raise TypeError(f"ddp_options may not have {unknown}: use {', '.join(sorted(known))}")
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ValueError("the model is already wrapped in DDP: pass the model inside it")
    model = model.to(device)
    if not distributed or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    unused = os.environ.get(FIND_UNUSED_VARIABLE, "").lower()
    if unused not in ("", "0", "false", "1", "true"):
        raise ValueError(f"{FIND_UNUSED_VARIABLE} must be 1, 0, true or false, not {unused!r}")
    options = {"find_unused_parameters": unused in ("1", "true"), **ddp_options}
    device_ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, **options)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile."""
    wraps = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
    inner = getattr(model, wraps, None)
    return unwrap_model(inner) if isinstance(inner, nn.Module) else model


def copied_buffers(*models: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return each buffer's module, name and copy: a forward pass may change it, as in BatchNorm."""
    parts = [part for model in models for part in model.modules()]
    own = [(part, name, b) for part in parts for name, b in part.named_buffers(recurse=False)]
    return [(module, name, buffer.clone()) for module, name, buffer in own]


def restore_buffers(copies: list[tuple[nn.Module, str, Tensor]]) -> None:
    """Set the buffers back to their copies, except a cache that has grown meanwhile."""
    for module, name, before in copies:
        if (buffer := getattr(module, name)).shape == before.shape:
            buffer.copy_(before)


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Give the model inside DDP, in eval mode and without gradients (collective).

    BatchNorm's buffers differ between ranks, because each rank has seen its own samples. So the
    ranks first copy rank 0's, as DDP does in each training step, except those that
    `broadcast_buffers=False` or DDP's ignore list leaves to each rank.
    """
    use_device(device)
    ddp: Any = model if isinstance(model, DistributedDataParallel) else None
    if ddp and ddp.broadcast_buffers and ddp.modules_buffers:
        ddp._sync_buffers()  # private, but DDP alone knows which buffers it copies
    inner = unwrap_model(model)
    modes = [(module, module.training) for module in inner.modules()]
    inner.eval()
    try:
        with torch.no_grad():
            yield inner
    finally:
        for module, training in modes:
            module.training = training


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread. In a new thread, that is cuda:0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def move(value: Any, device: torch.device) -> Any:
    """Move a batch to `device`: tensors, objects with a `to`, dicts, lists and tuples of them."""
    if isinstance(value, Tensor):
        # A copy to the CPU must wait: without it, Python could read memory that the GPU has not
        # written yet.
        return value.to(device, non_blocking=device.type != "cpu")
    if callable(to := getattr(value, "to", None)):  # a batch class of the user's own
        return to(device)
    return _map_parts(value, lambda part: move(part, device))


def copied(value: Any) -> Any:
    """Copy a batch, because `forward` may change it in place."""
    return value.clone() if callable(getattr(value, "clone", None)) else _map_parts(value, copied)


def detach(value: Any) -> Any:
    """Return `value` with all its tensors detached from the graph."""
    return value.detach() if isinstance(value, Tensor) else _map_parts(value, detach)


def _map_parts(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        # A class of its own is kept: the outputs of Hugging Face are dicts with attributes.
        own_class = isinstance(value, MutableMapping) and type(value) is not dict
        parts: Any = copy.copy(value) if own_class else {}
        for key, part in value.items():
            parts[key] = function(part)
        return parts
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [part.name for part in dataclasses.fields(value) if part.init]
        return dataclasses.replace(value, **{n: function(getattr(value, n)) for n in names})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if isinstance(value, list | tuple):
        return type(value)(map(function, value))
    return value
