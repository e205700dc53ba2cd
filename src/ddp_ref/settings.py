"""Check a Handler's settings before any work starts; each mistake is a one-line error."""

import inspect
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .collectives import exchange_objects
from .initialize import DistInfo, initialize_ddp, resolve_device
from .metrics import accumulates
from .model import use_device

SCALE_LR = "after the load, multiply each group's lr and the scheduler's base_lrs by one factor"
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


def check_numbers(accumulate: int, sync_every: int, clip_norm: float | None) -> None:
    """Raise ValueError unless each setting is a number in its range."""
    check_count("accumulate", accumulate)
    check_count("sync_every", sync_every)
    known = isinstance(clip_norm, int | float) and clip_norm > 0
    if clip_norm is not None and not known:
        raise ValueError(f"clip_norm must be a number above 0, or None, not {clip_norm!r}")


def check_choices(precision: str, on_nonfinite: str, accumulated: Mapping[str, Any]) -> None:
    """Raise ValueError unless each setting is one of its possible values.

    Args:
        precision: The name of the forward pass's precision.
        on_nonfinite: What to do with a loss or a gradient that is not finite.
        accumulated: The options of DDP if several batches make up a step.
    """
    if precision not in PRECISIONS:
        raise ValueError(f'precision must be "fp32", "bf16" or "fp16", not {precision!r}')
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f'on_nonfinite must be "raise" or "skip", not {on_nonfinite!r}')
    if accumulated.get("static_graph"):
        raise ValueError(
            "static_graph does not work with accumulate above 1: leave out one of the two"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ValueError unless `optimizer` trains `model` alone, in steps without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure and closure.default is closure.empty:  # as LBFGS
        raise ValueError(
            f"{type(optimizer).__name__}.step() needs a closure, which runs the model again: use "
            "another optimizer, or write your own loop"
        )
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if others := sum(id(parameter) not in own for parameter in given):
        raise ValueError(
            f"{others} of the optimizer's {len(given)} parameters are not the model's, so they "
            "are neither averaged nor saved: make everything that is trained a part of the model, "
            "and create the optimizer after the last change to the model"
        )


def check_functions(loss_fn: Any, metrics: Any, callbacks: Any) -> None:
    """Raise TypeError or ValueError unless these are of the right kind, objects and not classes."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of functions by name, not {metrics!r:.60}")
    if "loss" in metrics:
        raise ValueError('a metric cannot be named "loss": choose another name')
    for name, function in {"loss_fn": loss_fn, **metrics}.items():
        if isinstance(function, type) or not (callable(function) or accumulates(function)):
            raise TypeError(
                f"{name} must be a function of outputs and targets, or an object such as "
                f"nn.CrossEntropyLoss(), not {function!r:.60}"
            )
    if getattr(loss_fn, "reduction", "mean") == "sum":
        raise ValueError('loss_fn must be a mean, not a sum: use reduction="mean"')
    for callback in callbacks:
        if isinstance(callback, type) or hasattr(callback, "handler"):
            raise TypeError(
                f"callbacks must be objects, new ones for each Handler, not {callback!r:.60}"
            )


def scheduler_and_unit(scheduler: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, str | None]:
    """Return the scheduler and when it steps: "step", "epoch" or what a plateau watches."""
    if scheduler is None:
        return None, None
    inner, unit = scheduler if isinstance(scheduler, tuple) else (scheduler, "epoch")
    plateau = isinstance(inner, ReduceLROnPlateau)
    known = plateau or unit in ("step", "epoch")
    if isinstance(inner, type) or not hasattr(inner, "step") or not known:
        raise ValueError(
            f'scheduler must be a scheduler or (scheduler, "step"), not {scheduler!r:.100}'
        )
    if getattr(inner, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "the scheduler was created with another optimizer: create it with the one you pass here"
        )
    if plateau and (unit == "step" or (unit == "epoch" and inner.mode == "max")):
        raise ValueError(
            f"ReduceLROnPlateau cannot use the loss of each {unit} with mode={inner.mode!r}: pass "
            '(scheduler, "val_accuracy") or another name of the history'
        )
    return inner, unit


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, such as its learning rate."""
    groups = optimizer.param_groups
    # Copies, because a learning rate may be a tensor, which a scheduler changes.
    return [{n: deepcopy(v) for n, v in group.items() if n != "params"} for group in groups]


def check_keep(keep: Any, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Raise ValueError unless `keep` is a list of settings that can stay when a run is loaded."""
    names = {name for group in optimizer.param_groups for name in group} - {"params"}
    if not names >= {*keep}:
        raise ValueError(f"keep may contain {', '.join(sorted(names))}, but got {keep!r}")
    if scheduler and {"lr", "initial_lr"} & {*keep}:
        raise ValueError(f"keep has lr, but the scheduler sets it: {SCALE_LR}")


def join(
    device: torch.device | str | None, precision: str, use_distributed: bool | None
) -> tuple[DistInfo, torch.device]:
    """Open the group of this launch; return what it is, and the device to train on.

    Raises:
        ValueError: On all ranks, if a rank cannot use its device.
    """
    wanted = None if device is None else resolve_device(device, stacklevel=4)
    backend = "gloo" if wanted and wanted.type == "cpu" else None
    info = initialize_ddp(backend=backend, use_distributed=use_distributed)
    if wanted is None or wanted == torch.device(info.device.type):
        wanted = info.device  # "cuda" means the rank's own GPU
    cuda, problem = wanted.type == "cuda", ""
    if info.distributed and wanted != info.device:
        problem = (
            f"device={wanted}, but rank {info.rank} of the open group uses {info.device}: leave "
            "out device, or call cleanup_ddp first"
        )
    elif precision == "fp16" and not cuda:
        problem = f'precision="fp16" needs a CUDA device, not {wanted}: use "bf16"'
    elif precision == "bf16" and cuda and not torch.cuda.is_bf16_supported(False):
        problem = f'{wanted} has no bfloat16 in hardware: use precision="fp16" or "fp32"'
    # A rank that raised alone would leave the others waiting: a fixed "cuda:0" is right on rank 0.
    for text in exchange_objects(problem) if info.distributed else [problem]:
        if text:
            raise ValueError(text)
    use_device(wanted)
    return info, wanted
