"""What a batch is: its inputs and targets, where they lie, how many samples they have."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with its tensors on `device`, in dicts, lists and tuples too, by its `to`."""
    if isinstance(value, Tensor):
        # Whoever reads a copy on the CPU does not wait for the GPU that has yet to write it.
        return value.to(device, non_blocking=device.type != "cpu")
    if callable(to := getattr(value, "to", None)):  # a batch with a class of its own
        return to(device)
    if isinstance(value, Mapping):
        return {key: move(part, device) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(part, device) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(move(part, device) for part in value)
    return value


def pair(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a training batch."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        kind = type(batch).__name__
        size = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise ValueError(
            f"a batch must be (inputs, targets), not a {kind}{size}: change the data set's items, "
            "or give the loader a collate_fn"
        )
    return batch[0], batch[1]


def inputs_of(batch: Any) -> Any:
    """Return what a model is fed: the first element of a tuple or list, or the batch itself."""
    return batch[0] if isinstance(batch, list | tuple) else batch


def samples_in(value: Any) -> int:
    """Return the number of samples: the length of the first tensor found, or of a list of dicts."""
    if isinstance(value, Tensor) and value.dim():
        return len(value)
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return len(value)  # of a detection's targets, one for each sample
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(parts, str) or not hasattr(parts, "__iter__"):
        raise ValueError(
            f"a batch must begin with a tensor that has a sample a row, not with {value!r:.60}"
        )
    return samples_in(next(iter(parts), None))
