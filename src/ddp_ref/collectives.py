"""Combine values across ranks: sum, mean, max, min, gather and broadcast.

Every function here is collective: all ranks call it, in the same order and with the same `src` and
`to_all`. Without a process group, or in a world of one, each function returns what a single rank
would get. A received CPU tensor cannot be resized: clone it first. A rank whose value cannot be
sent raises, and must then exit, because the other ranks wait for its value. In a process that was
forked from a rank, such as a DataLoader's worker, every function raises a RuntimeError.
"""

import copyreg
import functools
import io
import math
import pickle
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .initialize import known_group, open_group, wait_for_all_ranks

T = TypeVar("T")
V = TypeVar("V", float, Tensor, float | Tensor)


def reduce_sum(values: Mapping[str, V]) -> dict[str, V]:
    """Sum each value over all ranks (collective).

    The ranks first compare names, shapes and dtypes, so that a mistake is an error and not a hang.
    Then all numbers and floating-point tensors travel in one all-reduce as float64, whatever their
    own dtype, all integers in another one as int64, and complex tensors in a third. Call this once
    per epoch rather than once per step. An integer sum that does not fit its dtype wraps around.

    Args:
        values: Numbers or tensors of any shape, by name, in any order. A rank with nothing to add
            passes {}. Bool tensors cannot be summed: pass `tensor.int()`.

    Returns:
        The sums by name, equal on every rank. A number comes back as a float. A tensor, also one
        without dimensions, comes back as a new tensor of its own dtype and shape, on its own
        device, without a gradient; on a rank that passed {} it is on the group's device.

    Raises:
        ValueError: If the ranks pass different names, shapes or dtypes, or a dtype that has no
            sum; on all ranks alike.
        TypeError: If a value is neither a number nor a tensor; on this rank only.
    """
    return _reduce(values, "sum")


def reduce_max(values: Mapping[str, V]) -> dict[str, V]:
    """Return the largest of each value over all ranks, element by element (collective).

    A nan on any rank is nan on all ranks. For bools, the result is True if any rank has True.

    Args:
        values: As in reduce_sum, and bool tensors too, but no complex ones, which have no order,
            and no uint64 ones, which do not fit int64.

    Returns:
        The largest values by name, in the form that reduce_sum describes.

    Raises:
        ValueError: As in reduce_sum.
        TypeError: As in reduce_sum.
    """
    return _reduce(values, "max")


def reduce_min(values: Mapping[str, V]) -> dict[str, V]:
    """Return the smallest of each value over all ranks, element by element (collective).

    A nan on any rank is nan on all ranks. For bools, the result is True if all ranks have True.

    Args:
        values: As in reduce_max.

    Returns:
        The smallest values by name, in the form that reduce_sum describes.

    Raises:
        ValueError: As in reduce_sum.
        TypeError: As in reduce_sum.
    """
    return _reduce(values, "min")


def reduce_mean(values: Mapping[str, V], count: float = 1) -> dict[str, V]:
    """Average each value over the samples of all ranks (collective).

    Each value is weighted by its count, so the result is the mean over all samples.

    Args:
        values: Means over this rank's samples: numbers, or floating-point or complex tensors.
            A rank with nothing passes {}.
        count: How many samples these means are over. The values of a rank with count 0 are
            ignored, even if they are nan. The default gives all ranks equal weight.

    Returns:
        The means by name, in the form that reduce_sum describes. A mean over no samples is nan.

    Raises:
        ValueError: On all ranks, as in reduce_sum; also if a tensor has integers or bools, whose
            mean does not fit their dtype, if a count is negative, infinite or nan, or if a rank
            passes {} with a count above 1.
        TypeError: As in reduce_sum.
    """
    return _reduce(values, "mean", float(count))


def gather_tensors(tensor: Tensor | None, to_all: bool = False) -> list[Tensor | None] | None:
    """Collect one tensor from each rank, in rank order (collective).

    Args:
        tensor: A tensor of any shape and dtype; both may differ between ranks. None if this rank
            has nothing, which is then its entry in the list.
        to_all: Return the list on every rank instead of on rank 0 alone.

    Returns:
        New tensors, detached and on the CPU, so that no GPU has to hold them all. None on the
        ranks that do not receive them.
    """
    # A conjugate or negative view has no bytes of its own to send.
    part = None if tensor is None else tensor.detach().resolve_conj().resolve_neg().contiguous()
    # gloo aborts in C++ if shapes differ, so the ranks share their shapes first, and then each
    # part travels on its own.
    specs = exchange_objects(None if part is None else (part.shape, part.dtype))
    parts = [move_tensor(part, spec, src, to_all) for src, spec in enumerate(specs)]
    return parts if to_all or _rank() == 0 else None


def gather_objects(obj: T, to_all: bool = False) -> list[T] | None:
    """Collect one picklable object from each rank, in rank order (collective).

    Args:
        obj: This rank's object. CUDA tensors in it arrive on the receiver's own device.
        to_all: Return the list on every rank instead of on rank 0 alone.

    Returns:
        Copies of the objects, this rank's own included, or None on ranks that do not receive them.
    """
    packed = torch.frombuffer(pack_object(obj), dtype=torch.uint8)
    parts: list[Any] | None = gather_tensors(packed, to_all)
    return parts and [pickle.loads(part.numpy().data) for part in parts]


def broadcast_object(obj: T, src: int = 0) -> T:
    """Return rank `src`'s object on every rank (collective).

    Args:
        obj: A picklable object; ignored on the other ranks. CUDA tensors in it arrive on the
            receiver's own device.
        src: The rank whose object it is: an integer (numpy's too) from 0 to world size - 1.

    Returns:
        The object itself on rank `src`, a copy of it on the others.

    Raises:
        ValueError: If `src` is not the integer number of a rank.
    """
    last = _world_size() - 1
    if not (hasattr(src, "__index__") and src in range(last + 1)):  # 0.0 is in the range, too
        raise ValueError(f"src must be a rank of this world, from 0 to {last}, not {src!r}")
    if last == 0:
        return obj
    packed = torch.frombuffer(pack_object(obj), dtype=torch.uint8) if _rank() == src else None
    parts: Any = gather_tensors(packed, to_all=True)
    return obj if _rank() == src else pickle.loads(parts[src].numpy().data)


def barrier() -> None:
    """Wait until all ranks have called (collective); a no-op in a world of one."""
    if opened := open_group():
        wait_for_all_ranks(opened.info.device)


def pack_object(obj: object) -> memoryview:
    """Return `obj` pickled, in a buffer that torch can send without another copy.

    `pickle.loads` unpacks it, which can run code, so load only what ranks of this job sent. A CUDA
    tensor arrives on the receiver's current CUDA device, or on the CPU if it sees none. A
    view of part of a tensor becomes a copy of that part.
    """
    buffer = PickleFile()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = {**copyreg.dispatch_table, **REDUCERS}
    pickler.dump(obj)
    return buffer.getbuffer()


class PickleFile(io.BytesIO):
    """A pickler's output that frees the CPU copy of a CUDA tensor as soon as it is written.

    Otherwise the pickler would keep all copies until the end.
    """

    def write(self, data: Any) -> int:
        size = super().write(data)
        if isinstance(data, pickle.PickleBuffer):
            data.release()
        return size


def reduce_storage(storage: torch.UntypedStorage, device: str | None = None) -> tuple[Any, ...]:
    """Return how to pickle the memory of tensors in one copy; torch's own way takes several.

    Args:
        storage: The memory.
        device: Where it arrives. Default: the receiver's current device of the same type.
    """
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _restore, (pickle.PickleBuffer(flat.cpu().numpy().data), device or storage.device.type)


def _restore(data: bytearray, device: str) -> torch.UntypedStorage:
    """Return the received memory, on the CPU if `device` is a GPU that is not visible here."""
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
    gpu = _device() if device == _device().type else torch.device(device)
    visible = gpu.type != "cuda" or (gpu.index or 0) < torch.cuda.device_count()
    return flat.to(gpu if visible else "cpu").untyped_storage()


def _reduce_typed_storage(storage: torch.TypedStorage) -> tuple[Any, ...]:
    untyped = {"wrap_storage": storage._untyped_storage, "dtype": storage.dtype}
    return functools.partial(torch.TypedStorage, **untyped, _internal=True), ()


def _reduce_tensor(tensor: Any) -> Any:
    # A view is sent with its whole storage, so copy a view of a larger tensor first.
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if tensor.dtype in torch.storage._new_dtypes():  # uint16, float8, ...: torch cannot pickle them
        return Tensor.view, (tensor.view(getattr(torch, f"int{8 * tensor.itemsize}")), tensor.dtype)
    return tensor.__reduce_ex__(5)


REDUCERS: dict[Any, Any] = {  # for a pickler's dispatch_table
    Tensor: _reduce_tensor,
    torch.TypedStorage: _reduce_typed_storage,
    torch.UntypedStorage: reduce_storage,
}


def exchange_objects(own: T) -> list[T]:
    """Return the small objects that all ranks pass, in rank order (collective)."""
    per_rank = [own] * _world_size()
    if len(per_rank) > 1:
        dist.all_gather_object(per_rank, own, _cpu_group())
    return per_rank


def move_tensor(own: Any, spec: Any, src: int, to_all: bool = False) -> Tensor | None:
    """Send rank `src`'s tensor to rank 0, or to all ranks; return it there, on the CPU, else None.

    Only the ranks that send or receive have to call. `spec` is the tensor's shape and dtype, or
    None if there is none. `own` is the tensor, contiguous, on rank `src`, and unused elsewhere.
    """
    sends, gets = _rank() == src, to_all or _rank() == 0
    if spec is None or not (sends or gets):
        return None
    # A rank that also gets its own tensor gets a copy of it.
    whole = own.to("cpu", copy=gets) if sends else torch.empty(spec[0], dtype=spec[1], device="cpu")
    # Not every backend sends every dtype, but all of them send bytes. A tensor of one element is
    # contiguous whatever its stride says, so the stride is set here.
    if whole.numel() and _world_size() > 1 and (to_all or src > 0):
        flat, group = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8), _cpu_group()
        if to_all:
            dist.broadcast(flat, src, group)
        else:
            dist.send(flat, 0, group) if sends else dist.recv(flat, src, group)
    return whole if gets else None


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if _world_size() > 1 else 0


def _device() -> torch.device:
    """Return the device of this rank, whose tensors the default group takes; alone, the CPU."""
    # Not "cuda", which means cuda:0 in a new thread.
    return known_group().info.device if _world_size() > 1 else torch.device("cpu")


def _cpu_group() -> dist.ProcessGroup | None:
    """Return the group for CPU tensors: under nccl the side group, else None, the default group."""
    opened = open_group()  # it also refuses a forked process, which would wait forever
    return opened.side if opened and opened.info.device.type == "cuda" else None


def _reduce(values: Mapping[str, Any], how: str, count: float = 1) -> dict[str, Any]:
    """Return each value reduced over all ranks; `how` is "sum", "mean", "max" or "min"."""
    kinds = {name: "tensor" if isinstance(v, Tensor) else "number" for name, v in values.items()}
    own = {name: _as_tensor(name, value) for name, value in values.items()}
    specs, total = _agree({n: (kinds[n], t.dtype, t.shape) for n, t in own.items()}, count)
    dtypes = {name: _transport_dtype(name, dtype, how) for name, (_, dtype, _) in specs.items()}
    results: dict[str, Any] = dict.fromkeys(specs)
    for transport in dict.fromkeys(dtypes.values()):  # a set's order differs between processes
        names = [name for name in specs if dtypes[name] == transport]
        sizes = [specs[name][2].numel() for name in names]
        bound = torch.iinfo(transport).max if transport == torch.int64 else math.inf
        neutral = {"max": -bound - 1, "min": bound}.get(how, 0)  # it changes no result
        flat = torch.full((sum(sizes),), neutral, dtype=transport, device=_device())
        if own and count:  # zero times nan is nan, so a rank without samples adds plain zeros
            flat = torch.cat([own[name].reshape(-1).to(flat) for name in names])
        flat = _all_reduce(flat * count, "sum") / total if how == "mean" else _all_reduce(flat, how)
        for name, part in zip(names, flat.split_with_sizes(sizes), strict=True):
            kind, dtype, shape = specs[name]
            tensor = part.view(shape).to(own.get(name, part).device, dtype, copy=True)
            results[name] = tensor if kind == "tensor" else tensor.item()
    return results


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:  # float() would also take a str
        return torch.tensor(value.__float__(), dtype=torch.float64)
    except (AttributeError, TypeError, OverflowError):  # numpy: an array of several numbers
        raise TypeError(f"{name!r} must be a number or a tensor, not {value!r}") from None


def _agree(own: dict[str, Any], count: float) -> tuple[dict[str, Any], float]:
    """Return the names and specs that the ranks with values pass, and the sum of their counts."""
    per_rank = exchange_objects((own, count))
    specs = next((spec for spec, _ in per_rank if spec), {})
    if any(spec not in ({}, specs) for spec, _ in per_rank):
        passed = "; ".join(f"rank {rank}: {spec}" for rank, (spec, _) in enumerate(per_rank))
        raise ValueError(f"ranks must pass the same names, shapes and dtypes, or {{}}: {passed}")
    for spec, samples in per_rank:
        if not 0 <= samples < math.inf:
            raise ValueError(f"count must be at least 0 and finite, not {samples:g}")
        if samples > 1 and not spec:  # 1 is the default
            raise ValueError(f"values is {{}} but count is {samples:g}: pass the means, or count=0")
    return specs, sum(samples for spec, samples in per_rank if spec)


def _transport_dtype(name: str, dtype: torch.dtype, how: str) -> torch.dtype:
    """Return the dtype in which a value travels: backends reduce few dtypes, but all these."""
    exact = not (dtype.is_floating_point or dtype.is_complex)
    unordered = dtype.is_complex or dtype == torch.uint64  # a large uint64 is a negative int64
    if {"sum": dtype == torch.bool, "mean": exact}.get(how, unordered):
        convert = {"sum": "int", "mean": "double"}.get(how, "abs" if dtype.is_complex else "double")
        raise ValueError(f"cannot take the {how} of {name!r}, a {dtype}: pass its .{convert}()")
    return torch.int64 if exact else torch.complex128 if dtype.is_complex else torch.float64


def _all_reduce(flat: Tensor, how: str) -> Tensor:
    if _world_size() > 1 and (how == "sum" or flat.dtype == torch.int64):
        dist.all_reduce(flat, getattr(dist.ReduceOp, how.upper()))
    elif _world_size() > 1:
        # Whether gloo's maximum of nan and a number is nan depends on the ranks' order, and the
        # other numbers can get lost with it. So a second row says where nan was.
        sign = 1 if how == "max" else -1
        rows = torch.stack([sign * flat, flat.isnan().to(flat)])
        dist.all_reduce(rows, dist.ReduceOp.MAX)
        flat = (sign * rows[0]).masked_fill(rows[1] > 0, math.nan)
    return flat
