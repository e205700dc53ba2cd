"""What a batch is: its inputs and targets, where they lie, how many samples they have."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .data import TrainSampler


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with its tensors on `device`, in dicts, lists and tuples too."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
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
    """Return the number of samples: the length of the first tensor found."""
    if isinstance(value, Tensor) and value.dim():
        return len(value)
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(parts, str) or not hasattr(parts, "__iter__"):
        raise ValueError(
            f"a batch must begin with a tensor that has a sample a row, not with {value!r:.60}"
        )
    return samples_in(next(iter(parts), None))


def set_place(loader: DataLoader[Any], epoch: int, position: int) -> None:
    """Set where the next iteration begins: at `position` samples, over all ranks, of `epoch`."""
    if isinstance(loader.sampler, TrainSampler):
        loader.sampler.start(epoch, position)
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if set_epoch := getattr(sampler, "set_epoch", None):
            set_epoch(epoch)


def batches_from(loader: DataLoader[Any], seen: int) -> Iterator[Any]:
    """Return the batches after the `seen` samples of this rank; the iterator is made at once."""
    batches = iter(loader)
    if isinstance(loader.sampler, TrainSampler):
        return batches  # it begins there
    while seen > 0:
        seen -= samples_in(pair(next(batches))[1])
    return batches
