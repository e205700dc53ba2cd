"""Handle batches of any structure: run the model on them, move them and count their samples."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread. In a new thread, that is cuda:0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def default_forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Feed the model the first part of an (inputs, targets) batch; return outputs and targets."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise ValueError(
            f"a batch must be (inputs, targets), not a {type(batch).__name__}{size}: pass forward= "
            "to Handler, or give the loader a collate_fn that returns pairs"
        )
    return model(batch[0]), batch[1]


def inputs_of(batch: Any) -> Any:
    """Return the model's inputs: the first element of a tuple or list, else the batch itself."""
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not _may_be_inputs(inputs):
        raise ValueError(
            f"a batch must start with a tensor with one row per sample, not with {inputs!r:.60}: "
            "give the loader a collate_fn, or pass forward= to Handler"
        )
    return inputs


def default_count(batch: Any) -> int:
    """Return the number of samples: of the targets in a pair, else of the batch itself."""
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    for part in reversed(batch) if is_pair else [batch]:
        if (count := _samples_in(part, is_pair, is_pair and _samples_in(batch[0]))) is not None:
            return count
    raise ValueError(
        f"cannot tell how many samples a batch of type {type(batch).__name__} has: pass count= to "
        "Handler, or give the loader a collate_fn that returns tensors"
    )


def _samples_in(value: Any, may_be_samples: bool = True, inputs: int | None = None) -> int | None:
    if isinstance(value, Tensor):
        return len(value) if value.dim() else None
    if isinstance(graphs := getattr(value, "num_graphs", None), int):  # of PyTorch Geometric
        return graphs
    if isinstance(value, Mapping):
        counts = map(_samples_in, value.values())
        return next((count for count in counts if count is not None), None)
    # default_collate makes a list with one tensor for each part of a target: all of them have as
    # many rows as there are inputs. Detection targets are a list with one dict or tensor per
    # sample, so the length of that list is the count.
    parts = value if isinstance(value, list | tuple) else ()
    lengths = {len(part) for part in parts if isinstance(part, Tensor) and part.dim()}
    if may_be_samples and lengths and lengths != {inputs or max(lengths) or None}:
        return len(parts)
    if parts and not isinstance(parts[0], Mapping) and (count := _samples_in(parts[0])) is not None:
        return count
    return len(value) if hasattr(value, "__len__") and not isinstance(value, str) else None


def move(value: Any, device: torch.device) -> Any:
    """Move a batch to `device`: tensors, objects with a `to`, dicts, lists and tuples of them."""
    if isinstance(value, Tensor):
        # A copy to the CPU must wait: without it, Python could read memory that the GPU has not
        # written yet.
        return value.to(device, non_blocking=device.type != "cpu")
    if callable(to := getattr(value, "to", None)):  # a batch class of the user's own
        return to(device)
    return _map_parts(value, lambda part: move(part, device))


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


def _may_be_inputs(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_may_be_inputs, value))
    return not isinstance(value, str | bytes | int | float)
