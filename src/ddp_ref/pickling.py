"""Send values to another process: functions by cloudpickle, tensors by `torch.save`."""

import pickle
from io import BytesIO
from typing import Any

import cloudpickle
import torch

PICKLE = b"\x80"  # a pickle begins with it, an archive of torch.save with another byte


def dumps(what: str, value: Any) -> bytes:
    """Return `value` as bytes; raise TypeError, with `what` it is, where it does not pickle.

    What comes before its first tensor is pickled twice.
    """
    try:
        return _without_tensors(value) or _with_tensors(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error


def loads(packed: bytes) -> Any:
    """Return what `dumps` packed; a tensor of a GPU that is not here comes to the CPU."""
    if packed.startswith(PICKLE):
        return pickle.loads(packed)
    return torch.load(BytesIO(packed), map_location=_place, weights_only=False)


class _HasTensors(Exception):
    """The value holds tensors, which torch.save sends better than a pickle does."""


def _without_tensors(value: Any) -> bytes | None:
    """Return `value` pickled, a hundredth of torch.save's time; None if it has tensors."""
    buffer = BytesIO()
    try:
        _Plain(buffer, 5).dump(value)
    except _HasTensors:
        return None
    return buffer.getvalue()


def _with_tensors(value: Any) -> bytes:
    buffer = BytesIO()
    torch.save(value, buffer, pickle_module=_CloudPickle(), pickle_protocol=5)
    return buffer.getvalue()


class _Plain(cloudpickle.Pickler):
    tensors = torch.Tensor, torch.UntypedStorage, torch.TypedStorage

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, self.tensors):
            raise _HasTensors
        return super().reducer_override(obj)


class _CloudPickle:
    """What `torch.save` takes for a pickle module: cloudpickle, with views cut to their size."""

    __name__ = "cloudpickle"

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is torch.Tensor and _is_view(obj):
                return obj.detach().clone().requires_grad_(obj.requires_grad).__reduce_ex__(5)
            return super().reducer_override(obj)


def _is_view(tensor: torch.Tensor) -> bool:
    """Say whether the storage, all of which would be sent, holds more than the tensor."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _place(storage: Any, location: str) -> Any:
    device = torch.device(location)
    here = device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()
    return torch.serialization.default_restore_location(storage, location if here else "cpu")
