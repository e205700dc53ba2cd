"""The settings of a Handler: checked before anything is done with them."""

import inspect
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..initialize import DistInfo
from .model import use_device
from .rank_sync import raise_on_all_ranks

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_optimizer(optimizer: Any, model: nn.Module, reads_gradients: bool) -> None:
    """Raise TypeError or ValueError unless `optimizer` is one that Handler can use with `model`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be one torch.optim.Optimizer, not a {type(optimizer).__name__}: with "
            "several optimizers, as for a GAN, write your own loop with wrap_model and train_loader"
        )
    kind = type(optimizer).__name__
    if kind == "LBFGS":
        raise ValueError("LBFGS runs the model several times per step: use another optimizer")
    if kind == "ZeroRedundancyOptimizer":
        raise ValueError(
            f"{kind} shards its state, which rank 0 could not save: use the optimizer inside it"
        )
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if others := sum(id(parameter) not in own for parameter in given):
        raise ValueError(
            f"{others} of the optimizer's {len(given)} parameters are not the model's, so they "
            "are neither averaged nor saved: make everything that is trained a part of the model"
        )
    embeddings = [p for p in model.modules() if isinstance(p, nn.Embedding | nn.EmbeddingBag)]
    if reads_gradients and any(e.sparse and e.weight.requires_grad for e in embeddings):
        raise ValueError(
            'clip_norm and on_nonfinite="skip" cannot read sparse gradients: leave them out, or '
            "create the embedding with sparse=False"
        )


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


def check_settings(clip_norm: float | None, precision: str, on_nonfinite: str) -> None:
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be above 0, or None, not {clip_norm!r}")
    if precision not in PRECISIONS:
        raise ValueError(f'precision must be "fp32", "bf16" or "fp16", not {precision!r}')
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f'on_nonfinite must be "raise" or "skip", not {on_nonfinite!r}')


def pick_device(wanted: torch.device | None, precision: str, info: DistInfo) -> torch.device:
    """Return the device to train on; raise on all ranks if a rank cannot use it."""
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
    raise_on_all_ranks(problem, info.distributed)  # a fixed "cuda:0" is right on rank 0
    use_device(wanted)
    return wanted


def scheduler_and_unit(scheduler: Any) -> tuple[Any, str | None]:
    """Return the scheduler and when it steps: "step", "epoch" or what a plateau watches."""
    if scheduler is None:
        return None, None
    pair = scheduler if isinstance(scheduler, tuple) else (scheduler, "epoch")
    step = getattr(pair[0], "step", None)
    plateau = isinstance(pair[0], ReduceLROnPlateau)
    units = isinstance(pair[-1], str) and (plateau or pair[-1] in ("step", "epoch"))
    if len(pair) != 2 or not units or not callable(step):
        raise ValueError(
            f'scheduler must be a scheduler or (scheduler, "step"), not {scheduler!r:.100} (for a '
            "Lightning dict pass dict['scheduler'])"
        )
    if plateau:
        if pair[1] == "step":
            raise ValueError('ReduceLROnPlateau needs the loss of an epoch: pass it without "step"')
        if pair[0].mode == "max" and pair[1] == "epoch":
            raise ValueError(
                'ReduceLROnPlateau(mode="max") would get a loss: pass (scheduler, "val_accuracy") '
                "or another name of the history"
            )
        return pair[0], pair[1]
    arguments = [p for p in inspect.signature(step).parameters.values() if p.default is p.empty]
    if needed := [p.name for p in arguments if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise ValueError(
            f"{type(pair[0]).__name__}.step() needs {', '.join(needed)}: step it in a Callback"
        )
    return pair[0], pair[1]


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, such as its learning rate."""
    groups = optimizer.param_groups
    # Copies, because a learning rate may be a tensor, which a scheduler changes.
    return [{n: deepcopy(v) for n, v in group.items() if n != "params"} for group in groups]
