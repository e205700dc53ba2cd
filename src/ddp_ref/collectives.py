"""Combine what the ranks hold: exact sums and means, ordered gathers, objects.

Every function is collective: all ranks call it, in the same order. A rank with nothing to give is
welcome; one whose part cannot be sent raises, and must end, as the others wait for it. In a world
of one, or with no process group, each returns what a single rank would get.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
MESSAGE = 2**20  # bytes from which a message costs more for what it holds than for being one
Number = float | Tensor  # a Python number or a tensor of one element, on any device


def reduce_sum(
    values: Mapping[str, Number], *, names: Sequence[str] | None = None
) -> dict[str, float]:
    """Sum each value over all ranks, in float64 (collective: all ranks call).

    A rank with nothing to add passes {}. With `names`, the same on all ranks, everything is one
    packed all-reduce; without, the ranks first tell each other their names. Raises ValueError where
    they differ (on all ranks alike unless `names` is given).
    """
    own = {name: float(value) for name, value in values.items()}
    names = _agree_on_names(own, names)
    sums = _all_reduce([own.get(name, 0.0) for name in names])
    return dict(zip(names, sums, strict=True))


def reduce_mean(
    values: Mapping[str, Number], count: float, *, names: Sequence[str] | None = None
) -> dict[str, float]:
    """Average each value over the samples of all ranks, in float64 (collective: all ranks call).

    `values` are means over this rank's `count` samples; a rank with none passes 0, and its values,
    if any, are not looked at. The mean over no samples at all is nan. `names` as in reduce_sum:
    the counts travel in the same packed all-reduce.
    """
    if count and not values:
        raise ValueError(f"values are empty for {count} samples: pass their means, or a count of 0")
    own = {name: float(value) for name, value in values.items()}
    names = _agree_on_names(own, names)
    if count and _world_size() == 1:
        return own
    sums = [own.get(name, 0.0) * count if count else 0.0 for name in names]
    *totals, samples = _all_reduce([*sums, float(count)])
    means = [total / samples if samples else math.nan for total in totals]
    return dict(zip(names, means, strict=True))


def check_same(device: torch.device, **numbers: int) -> None:
    """Raise ValueError, on all ranks, unless all have the same `numbers` (collective).

    `device` is one that the default group works on.
    """
    if _world_size() == 1:
        return
    own = torch.tensor(list(numbers.values()), device=device)
    bounds = torch.stack([own, -own])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    most, least = bounds.tolist()
    for (what, number), high, low in zip(numbers.items(), most, least, strict=True):
        if high != -low:
            raise ValueError(
                f"all ranks must have the same data, this one has {number} {what}, they have "
                f"{-low} to {high}: seed what draws it, wait for what writes it"
            )


def gather_tensors(tensor: Tensor | None) -> list[Tensor | None] | None:
    """Return the tensors of all ranks, in rank order, on rank 0; None elsewhere (collective).

    Shapes and dtypes may differ; a rank with nothing passes None, which is its entry in the list.
    The parts are detached and on the CPU, so that rank 0's GPU never holds them all.
    """
    # A conjugate or a negative view has no bytes of its own to send.
    part = None if tensor is None else tensor.detach().resolve_conj().resolve_neg().contiguous()
    if _world_size() == 1:
        return [None if part is None else part.cpu()]
    # Collectives on different shapes abort in C++: the shapes first, then each part on its own.
    forms = _tell_all(None if part is None else (part.shape, part.dtype))
    if dist.get_rank() == 0:
        others = [form and _receive(rank, *form) for rank, form in enumerate(forms) if rank > 0]
        return [None if part is None else part.cpu(), *others]
    if part is not None:
        _send(part)
    return None


def gather_rows(pieces: Sequence[Tensor]) -> Tensor | None:
    """Return the rows of all ranks, dealt in turns, on rank 0; None elsewhere (collective).

    `pieces` hold this rank's rows in order, each (rows, ...) on the CPU: of the result they are the
    rows rank, rank + world_size and so on. They travel a mebibyte or so at a time, so that rank 0
    holds little but the result. Raises ValueError, on all ranks, where rows differ in shape or
    dtype.
    """
    groups = _grouped([piece.detach().resolve_conj().resolve_neg() for piece in pieces])
    kinds = {(piece.shape[1:], piece.dtype) for piece in pieces}
    every = _tell_all((kinds, [sum(map(len, group)) for group in groups]))
    kinds = {kind for given, _ in every for kind in given}
    if len(kinds) > 1:
        raise ValueError(f"rows must have one shape and dtype, not {kinds}: pad or convert them")
    parts = map(_joined, groups)
    if _world_size() > 1 and dist.get_rank() > 0:
        for part in parts:
            _send(part)
        return None
    shape, dtype = kinds.pop() if kinds else ((), torch.get_default_dtype())
    return _dealt(parts, [counts for _, counts in every], shape, dtype)


def gather_objects(obj: T) -> list[T] | None:
    """Return the objects of all ranks, in rank order, on rank 0; None elsewhere (collective).

    They travel pickled; CUDA tensors in them arrive on rank 0's own device.
    """
    if _world_size() == 1:
        return [obj]
    parts = gather_tensors(torch.frombuffer(bytearray(pack_object(obj)), dtype=torch.uint8))
    if parts is None:
        return None
    return [unpack_object(_to_bytes(part)) for part in parts if part is not None]


def broadcast_object(obj: T, src: int = 0) -> T:
    """Return the object of rank `src` on all ranks, whatever the others pass (collective).

    It travels pickled; CUDA tensors in it arrive on the receiver's own device.
    """
    if _world_size() == 1:
        return obj
    sender = dist.get_rank() == src
    box: list[Any] = [pack_object(obj) if sender else None]
    dist.broadcast_object_list(box, src)
    return obj if sender else unpack_object(box[0])


def pack_object(obj: object) -> bytes:
    """Return `obj` pickled, tensors included."""
    buffer = io.BytesIO()
    torch.save(obj, buffer, pickle_protocol=5)  # the default of 2 is slow on bytes and arrays
    return buffer.getvalue()


def unpack_object(packed: bytes | bytearray) -> Any:
    """Return what pack_object packed, for data of this program's own ranks only.

    CUDA tensors come to the current CUDA device, or to the CPU where there is none.
    """
    return torch.load(io.BytesIO(packed), map_location=_bring_here, weights_only=False)


def _bring_here(storage: Any, location: str) -> Any:
    return storage.cuda() if location.startswith("cuda") and torch.cuda.is_available() else storage


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _device() -> torch.device:
    """Return a device whose tensors the default group takes: the CPU, or under nccl the GPU."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _tell_all(own: T) -> list[T]:
    """Return what each rank passes, in rank order."""
    every = [own] * _world_size()
    if len(every) > 1:
        dist.all_gather_object(every, own)
    return every


def _dealt(
    own: Iterable[Tensor], counts: list[list[int]], shape: Any, dtype: torch.dtype
) -> Tensor:
    """Return the rows of all ranks, `counts` in each part of each rank, with rank 0's `own`."""
    whole = torch.empty(sum(map(sum, counts)), *shape, dtype=dtype)
    for rank, lengths in enumerate(counts):
        left = whole[rank :: len(counts)]
        parts = (_receive(rank, (n, *shape), dtype) for n in lengths) if rank else own
        for part in parts:
            left[: len(part)] = part
            left = left[len(part) :]
    return whole


def _grouped(pieces: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return `pieces` in groups of MESSAGE bytes or more, the last of what is left."""
    groups: list[list[Tensor]] = []
    nbytes = MESSAGE
    for piece in pieces:
        if nbytes >= MESSAGE:
            groups.append([])
            nbytes = 0
        groups[-1].append(piece)
        nbytes += piece.nbytes
    return groups


def _joined(group: Sequence[Tensor]) -> Tensor:
    return group[0] if len(group) == 1 else torch.cat(list(group))


def _agree_on_names(values: Mapping[str, Number], names: Sequence[str] | None) -> list[str]:
    if names is not None:
        if values and set(values) != set(names):
            raise ValueError(f"the values are {list(values)}, names says {list(names)}")
        return list(names)
    every = _tell_all(list(values))
    given = [names for names in every if names] or [[]]
    if any(set(names) != set(given[0]) for names in given):
        raise ValueError(f"every rank must pass the same names, or none; by rank: {every}")
    return given[0]


def _all_reduce(numbers: list[float]) -> list[float]:
    if not numbers or _world_size() == 1:
        return numbers
    packed = torch.tensor(numbers, dtype=torch.float64, device=_device())
    dist.all_reduce(packed)
    return packed.tolist()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat uint8 view: not every backend sends every dtype, all of them send bytes.

    `tensor` is contiguous, as one of a single element is whatever its stride says.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _send(tensor: Tensor) -> None:
    """Send `tensor` to rank 0, which receives it; nothing at all if it is empty."""
    if tensor.numel():
        dist.send(_as_bytes(tensor.contiguous()).to(_device()), 0)


def _receive(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=_device())
    if tensor.numel():
        dist.recv(_as_bytes(tensor), rank)
    return tensor.cpu()


def _to_bytes(tensor: Tensor) -> bytearray:
    buffer = bytearray(tensor.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(tensor)
    return buffer
