"""What a batch is: its inputs and targets, their device, and the number of samples."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def move(value: Any, device: torch.device) -> Any:
    """Move a batch to `device`: tensors, objects with a `to`, dicts, lists and tuples of them."""
    if isinstance(value, Tensor):
        # A copy to the CPU must wait: without it, Python could read memory that the GPU has not
        # written yet.
        return value.to(device, non_blocking=device.type != "cpu")
    if callable(to := getattr(value, "to", None)):  # a batch class of the user's own
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
    """Return the model's inputs: the first element of a tuple or list, else the batch itself."""
    return batch[0] if isinstance(batch, list | tuple) else batch


def samples_in(value: Any) -> int:
    """Return the number of samples: the length of the first tensor, or of a list of dicts."""
    if isinstance(value, Tensor) and value.dim():
        return len(value)
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return len(value)  # of a detection's targets, one dict per sample
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(parts, str) or not hasattr(parts, "__iter__"):
        raise ValueError(
            f"a batch must start with a tensor with one row per sample, not with {value!r:.60}"
        )
    return samples_in(next(iter(parts), None))
