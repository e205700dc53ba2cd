"""Wrap a rank's model in DistributedDataParallel (DDP), run it, and collect its outputs."""

import copy
import dataclasses
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .collectives import exchange_objects, move_tensor
from .initialize import CPU

FIND_UNUSED_VARIABLE = "DDP_FIND_UNUSED_PARAMETERS"
OTHER_OUTPUTS = (
    "predict returns a tensor, or a tuple or dict of tensors with one row per item, not {}. For "
    "other outputs: loader = eval_loader(data, batch_size); own = [model(batch[0]) for batch in "
    "loader]; every = gather_objects(own)"
)


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
    """
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ValueError("the model is already wrapped in DDP: pass the model inside it")
    model = model.to(device)
    open_group = dist.is_available() and dist.is_initialized()
    if not open_group or not any(parameter.requires_grad for parameter in model.parameters()):
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


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread. In a new thread, that is cuda:0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def run_model(model: nn.Module, batch: Any, forward: Any) -> tuple[Any, Any]:
    """Run the model on a batch; return its outputs and the targets.

    Args:
        model: The model, perhaps in DDP.
        batch: The batch, on the model's device.
        forward: The user's function of model and batch; None for a batch of inputs and targets.
    """
    if forward is not None:
        pair = forward(model, batch)
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        pair = model(batch[0]), batch[1]
    else:
        size = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise ValueError(
            f"a batch must be (inputs, targets), not a {type(batch).__name__}{size}: pass forward= "
            "to Handler, or give the loader a collate_fn that returns pairs"
        )
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"forward must return (outputs, targets), not a {type(pair).__name__}")
    return pair[0], pair[1]


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Give the model inside DDP, in eval mode and without gradients (collective).

    BatchNorm's buffers differ between ranks, because each rank has seen its own samples. So the
    ranks first copy rank 0's, as DDP does in each training step, except those that
    `forward_sync_buffers=False` or DDP's ignore list leaves to each rank.
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


def move(value: Any, device: torch.device) -> Any:
    """Move a batch to `device`: tensors, objects with a `to`, dicts, lists and tuples of them."""
    if isinstance(value, Tensor):
        # A copy to the CPU must wait: without it, Python could read memory that the GPU has not
        # written yet.
        return value.to(device, non_blocking=device.type != "cpu")
    if callable(to := getattr(value, "to", None)):  # a batch class of the user's own
        return to(device)
    if isinstance(value, Mapping):
        # A class of its own is kept: the outputs of Hugging Face are dicts with attributes.
        own_class = isinstance(value, MutableMapping) and type(value) is not dict
        parts: Any = copy.copy(value) if own_class else {}
        for key, part in value.items():
            parts[key] = move(part, device)
        return parts
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [part.name for part in dataclasses.fields(value) if part.init]
        return dataclasses.replace(value, **{n: move(getattr(value, n), device) for n in names})
    if isinstance(value, list | tuple):
        moved = [move(part, device) for part in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


# The outputs of a model, in the order of the data set


def rows_of(outputs: Any, items: int | None) -> dict[Any, Tensor]:
    """Return a batch's outputs on the CPU by name: tensors with one row per item.

    A tensor has the name None, and a tuple's parts have numbers. Parts without dimensions, such as
    a loss, are left out.

    Raises:
        TypeError: If there is anything else.
        ValueError: If a tensor has not one row per item.
    """
    parts = dict(enumerate(outputs)) if isinstance(outputs, tuple) else outputs
    if isinstance(outputs, Tensor):  # a single item may have been squeezed
        parts = {None: outputs if outputs.dim() else outputs.reshape(1)}
    if not isinstance(parts, Mapping):
        raise TypeError(OTHER_OUTPUTS.format(f"a {type(outputs).__name__}"))
    rows = {}
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.layout != torch.strided:
            raise TypeError(OTHER_OUTPUTS.format(f"a {type(part).__name__} as {name!r}"))
        if part.dim() and len(part) != items:
            raise ValueError(
                f"{len(part)} outputs for {items} items: return one row per item, not a mean"
            )
        if part.dim():
            rows[name] = part.to(CPU, copy=True)
    if not rows:
        raise TypeError(OTHER_OUTPUTS.format("numbers alone"))
    return rows


def gather_parts(batches: list[dict[Any, Tensor]], items: int, kind: Any, distributed: bool) -> Any:
    """Return the rows of all batches of all ranks on rank 0, None elsewhere (collective).

    Args:
        batches: What `rows_of` returned for each batch of this rank.
        items: The number of items in the data set.
        kind: The type of the model's outputs, which rank 0 knows if there is any item.
        distributed: Whether there are other ranks.
    """
    own = {tuple((n, r.shape[1:], r.dtype) for n, r in rows.items()) for rows in batches}
    every = exchange_objects(own) if distributed else [own]
    # A rank without items cannot tell which kind of outputs the other ranks have.
    kinds = set().union(*every) or {((None, torch.Size(), torch.float32),)}
    if len(kinds) > 1:
        raise ValueError(
            "all ranks must have the same data, and outputs with rows of one shape and dtype, not "
            f"{' or '.join(map(str, kinds))} for {items} items here: pad or convert them"
        )
    whole: dict[Any, Any] = {}
    for name, shape, dtype in kinds.pop():
        rows = torch.cat([torch.empty(0, *shape, dtype=dtype), *(r.pop(name) for r in batches)])
        whole[name] = gather_rows(rows, items) if distributed else rows
    if distributed and dist.get_rank():
        return None
    if None in whole:
        return whole[None]
    return tuple(whole.values()) if issubclass(kind, tuple) else kind(whole)


def gather_rows(own: Tensor, items: int) -> Tensor | None:
    """Return the rows of all ranks, interleaved, on rank 0, and None elsewhere (collective).

    Args:
        own: This rank's rows, (rows, ...). In the result they are the rows rank,
            rank + world_size, rank + 2 * world_size and so on. The ranks may differ by one row, and
            only a rank without rows may pass another shape or dtype than rank 0.
        items: The number of rows of all ranks together.

    Returns:
        All rows on rank 0: one tensor on the CPU.
    """
    whole = own.new_empty(items, *own.shape[1:], device=CPU)
    specs = exchange_objects((own.shape, own.dtype))
    for rank, spec in enumerate(specs):  # one after the other: rank 0 holds only two ranks' rows
        part = own if rank == dist.get_rank() == 0 else move_tensor(own.contiguous(), spec, rank)
        if part is not None and len(part):
            whole[rank :: dist.get_world_size()] = part
    return None if dist.get_rank() else whole
