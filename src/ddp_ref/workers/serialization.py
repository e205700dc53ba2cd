"""Turn values into bytes for another process: functions by cloudpickle, tensors by `torch.save`.

A GPU tensor is sent as a copy, and `loads` decides which device it arrives on.
"""

import pickle
from io import BytesIO
from typing import Any

import cloudpickle
import torch

STORAGES = torch.UntypedStorage, torch.TypedStorage


def dumps(what: str, value: Any) -> bytes:
    """Return `value` as bytes.

    Functions and classes of a script, a notebook or another function travel by value. Tensors lose
    their graph and their `.grad`, and no two tensors share memory any more.

    Args:
        what: What the value is, for the error message.
        value: Anything that cloudpickle can pickle.

    Returns:
        The bytes that `loads` reads.

    Raises:
        TypeError: If the value cannot be pickled.
    """
    buffer = BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error
    return buffer.getvalue()


def loads(packed: bytes, gpu: str | None = None) -> Any:
    """Return the value that `dumps` packed.

    Args:
        packed: The bytes.
        gpu: Where GPU tensors arrive: a device, "cuda" for the current GPU, or None for the GPU
            that they were on. They arrive on the CPU if that GPU is not visible here.
    """
    return _Unpickler(packed, gpu).load()


def destination(location: str, gpu: str | None) -> str:
    """Return the device on which a tensor from the device `location` arrives; see `loads`."""
    if not location.startswith("cuda"):
        return location
    target = torch.device(gpu or location)
    visible = target.type != "cuda" or (target.index or 0) < torch.cuda.device_count()
    return str(target) if visible else "cpu"


class _Pickler(cloudpickle.Pickler):
    """Send the memory of tensors by `torch.save`, and of a view only the part that it shows."""

    def persistent_id(self, obj: Any) -> bytes | None:
        if not isinstance(obj, STORAGES):
            return None
        buffer = BytesIO()
        torch.save(obj, buffer)
        return buffer.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) is torch.Tensor and obj.layout is torch.strided
        if plain and obj.untyped_storage().nbytes() > obj.nbytes:  # all of it would be sent
            obj = obj.detach().clone().requires_grad_(obj.requires_grad)
            return obj.__reduce_ex__(5)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: bytes, gpu: str | None) -> None:
        super().__init__(BytesIO(packed))
        self._gpu = gpu

    def persistent_load(self, saved: bytes) -> Any:
        def restore(storage: Any, location: str) -> Any:
            move: Any = torch.serialization.default_restore_location
            return move(storage, destination(location, self._gpu))

        return torch.load(BytesIO(saved), map_location=restore, weights_only=False)
