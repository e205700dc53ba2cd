"""What all ranks must have in common: the settings, the data and the parameters.

Ranks that differ would wait for each other, or silently train wrongly.
"""

import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .callbacks import Checkpoint
from .collectives import exchange_objects
from .data import TrainSampler, length_or_none
from .randomness import generator_state, seed_everything, set_generator_state
from .settings import group_settings

if TYPE_CHECKING:
    from .handler import Handler

COMPARED = ("seed", "accumulate", "sync_every", "clip_norm", "precision", "on_nonfinite")
TOLERANCE = 1e-6  # of a parameter's norm, relative: GPUs of different models round differently
BLOCK = 256  # numbers that are added up in float32
DRAWN = 4  # items of a data set that are compared: two could have equal labels by chance
DRAWS = 8  # how often two ranks' different items are drawn again, in case they are random
LONGEST = 100  # characters of a value in an error
MISSING = "missing"
WHOLE_SET = "; pass the whole data set, in the same order, on each: seed what draws it"


def shared(handler: "Handler", epochs: int, max_steps: int | None) -> dict[str, Any]:
    """Return the settings of a run that all ranks must have in common, by name."""
    own: dict[str, Any] = {name: getattr(handler, name) for name in COMPARED}
    own |= {"epochs": epochs, "max_steps": max_steps, "run_dir": str(handler.run_dir)}
    for name in ("optimizer", "scheduler", "loss_fn"):
        part = getattr(handler, name)
        own[name] = getattr(part, "__qualname__", type(part).__name__)
    own |= {"metrics": list(handler.metrics), "use of count=": handler.count is not None}
    own["interval of the scheduler"] = handler.scheduler_unit
    for number, group in enumerate(group_settings(handler.optimizer)):
        for name, value in group.items():
            plain = value.item() if isinstance(value, Tensor) else value
            if isinstance(plain, int | float | str | tuple | None):
                own[f"{name} of the optimizer's group {number}"] = plain
    savers = [callback for callback in handler.callbacks if isinstance(callback, Checkpoint)]
    own["Checkpoint (folder, every_epochs, every_steps, monitor, mode)"] = [
        (str(c.folder), c.every_epochs, c.every_steps, c.monitor, c.mode) for c in savers
    ]
    for name, loader in (("training", handler.train_loader), ("validation", handler.val_loader)):
        own[f"number of {name} items"] = length_or_none(getattr(loader, "dataset", None))
        own[f"{name} batch size"] = getattr(loader, "batch_size", None)
    return own | {"number of steps left in the epoch": handler.steps_left}


def check_same(
    call: str, own: Mapping[str, Any], loaders: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ValueError on all ranks if they differ in a setting or in their data (collective).

    Args:
        call: What all ranks are in, such as "Handler.train".
        own: This rank's settings by name.
        loaders: This rank's loaders by name; some of their items must be the same.
        device: This rank's device.
    """
    # In a worker if any loader has one: a file that is opened here would be shared by all forks.
    fork = any(getattr(loader, "num_workers", 0) for loader in loaders.values())
    items = {f"{name} items": items_of(loader, device, fork) for name, loader in loaders.items()}
    every = exchange_objects({**own, **items}, call)
    for name in dict.fromkeys(name for each in every for name in each):
        values = [each.get(name, MISSING) for each in every]
        if all(value == values[0] for value in values):
            continue
        if name in items and MISSING not in values:
            loader = loaders[name.removesuffix(" items")]
            again = items_of(loader, device, fork, DRAWS) == items[name]
            if not all(exchange_objects(again)):
                continue  # the items are random
        ranks: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            ranks.setdefault(str(value), []).append(rank)
        text = "; ".join(f"{v:.{LONGEST}} on rank {str(r)[1:-1]:.40}" for v, r in ranks.items())
        way = WHOLE_SET if name.endswith(" items") else ""
        raise ValueError(f"all ranks must have the same {name}, but found {text:.600}{way}")


def check_replicas(model: nn.Module, distributed: bool, finite: bool = True) -> None:
    """Raise on all ranks if a parameter is not finite, or differs between ranks (collective).

    Raises:
        FloatingPointError: If `finite`, and a trainable parameter is not: training cannot recover.
        RuntimeError: If it differs.
    """
    left_out = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # DDP's own name for it
    named = {name: p for name, p in model.named_parameters() if name not in left_out}
    if not named:
        return
    norms = torch.stack([_norm(parameter.detach()) for parameter in named.values()])
    norms = norms.nan_to_num(-1, -1, -1)  # not every backend compares nan
    ends = torch.cat([norms, -norms])
    if distributed:
        dist.all_reduce(ends, dist.ReduceOp.MAX)
    for name, high, low in zip(named, *ends.view(2, -1).tolist(), strict=True):
        if low == 1 and finite and named[name].requires_grad:  # a frozen one may be a mask
            raise FloatingPointError(
                f"parameter {name} is not finite: load an earlier checkpoint and lower the "
                "learning rate"
            )
        if high + low > TOLERANCE * abs(high):
            raise RuntimeError(
                f"parameter {name} differs between ranks: its norm is {-low:.9g} to {high:.9g}. "
                "Something changes weights on each rank by itself, such as a forward pass or a "
                "callback under no_grad, or a hook on gradients: change them alike on all ranks"
            )


def _norm(value: Tensor) -> Any:
    """Return the norm in float64, by way of blocks: float64 throughout takes ten times as long."""
    real = torch.view_as_real(value) if value.is_complex() else value
    if not real.is_floating_point() or real.element_size() == 1:  # float8 has no norm either
        real = real.double()
    flat, kind = real.reshape(-1), torch.promote_types(real.dtype, torch.float32)
    rest = len(flat) % BLOCK
    blocks = flat[rest:].unflatten(0, (len(flat) // BLOCK, BLOCK)), flat[:rest].unsqueeze(0)
    norms = [torch.linalg.vector_norm(block, dim=1, dtype=kind) for block in blocks]
    return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)


def items_of(
    loader: DataLoader[Any] | None, device: torch.device, fork: bool, times: int = 1
) -> str:
    """Return what identifies some items of a loader's data set, the first and the last among them.

    They are drawn `times` times through the loader's own settings, with the same seed on all ranks;
    draws that differ are all in the text. With a sampler of the user's, which may ask for other
    items, nothing is drawn.
    """
    if loader is None or type(loader.sampler) not in (TrainSampler, range):
        return ""
    size = len(loader.dataset)  # type: ignore[arg-type]
    options: dict[str, Any] = {"num_workers": int(fork), "generator": torch.Generator()}
    if fork:
        options |= {n: getattr(loader, n) for n in ("timeout", "multiprocessing_context")}
        options["worker_init_fn"] = partial(_start, loader.worker_init_fn)
    state = generator_state(device)
    seed_everything(0)
    try:
        which = sorted({part * (size - 1) // (DRAWN - 1) for part in range(DRAWN)}) if size else []
        options |= {"batch_sampler": [which] * times, "collate_fn": _seeded}
        drawn = " or ".join(dict.fromkeys(DataLoader(loader.dataset, **options)))
    finally:
        set_generator_state(state, device)
    return drawn if len(drawn) <= LONGEST else f"{drawn[:LONGEST]}... {zlib.crc32(drawn.encode())}"


def _start(user_init_fn: Any, worker: int) -> None:
    """Start the worker that draws: the user's function may seed each rank differently."""
    if user_init_fn:
        user_init_fn(worker)
    seed_everything(0)


def _seeded(items: Any) -> str:
    seed_everything(0)  # the next draw begins like this one
    return _described(items)


def _described(value: Any) -> str:
    """Return a text for `value`, which is the same for equal data in every process."""
    if isinstance(value, Mapping):
        return ", ".join(sorted(f"{name}: {_described(part)}" for name, part in value.items()))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, str | int | None):
        return repr(value)
    with suppress(Exception):  # objects of the user's: anything may happen
        if isinstance(value, Tensor | np.ndarray | float):
            numbers = torch.as_tensor(value).detach().cpu()
            if numbers.is_floating_point():  # its last bits may depend on the processor
                numbers = numbers.double().abs()
                return f"{[*numbers.shape]} {numbers.sum():.4g} {numbers.norm():.4g}"
            whole = zlib.crc32(numbers.numpy().tobytes())
            return f"{numbers.item()}" if numbers.numel() == 1 else f"{[*numbers.shape]} {whole}"
        if hasattr(value, "to_dict"):  # PyTorch Geometric
            return _described(value.to_dict())
        if hasattr(value, "tobytes"):  # an image
            return f"{type(value).__name__} {zlib.crc32(value.tobytes())}"
    return type(value).__name__  # not pickle: equal objects may have different pickles
