"""One optimizer step: precision, clipping, non-finite gradients and the scheduler."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .checks import raise_on_all_ranks

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class OptimizerStep:
    """Turn losses into optimizer steps: `backward` for each batch of a step, then `clip`, `step`.

    The constructor is collective if there are other ranks.

    Args:
        handler: The Handler, for its optimizer, device, clip_norm, precision and on_nonfinite.
        scheduler: A scheduler that steps once per epoch, `(scheduler, "step")` for one that steps
            after each optimizer step, or None.

    Raises:
        ValueError: If a setting is unknown; on all ranks, if a rank's device does not support it.
    """

    def __init__(self, handler: Any, scheduler: Any) -> None:
        self.clip_norm, self.precision = handler.clip_norm, handler.precision
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, or None, not {self.clip_norm!r}")
        on_nonfinite = handler.on_nonfinite
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f'on_nonfinite must be "raise" or "skip", not {on_nonfinite!r}')
        self.optimizer, self.device = handler.optimizer, handler.device
        _check_precision(self.precision, self.device, handler.info.distributed)
        self.scheduler, self.unit = _scheduler(scheduler)
        self.skip_nonfinite = on_nonfinite == "skip"
        self.scaler = torch.amp.GradScaler() if self.precision == "fp16" else None
        self._scale: float | None = None  # the loss scale after the last step
        self.skipped = 0  # steps that were not taken

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that gives a forward pass this precision, whatever surrounds it."""
        kind, enabled = self.device.type, self.precision != "fp32"
        if not enabled and not torch.is_autocast_enabled(kind):
            return nullcontext()  # cheaper than switching off what is off already
        return torch.autocast(kind, PRECISIONS[self.precision], enabled=enabled)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of `loss`, which adds to the gradients."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def clip(self) -> bool:
        """Clip the gradients; return False if they are not finite and the step must be skipped."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is None and not self.skip_nonfinite:
            return True
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # DDP has already averaged the gradients, so all ranks agree.
        if self.skip_nonfinite and not torch.isfinite(norm):
            return False
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
        return True

    def step(self, taken: bool) -> bool:
        """Step, unless `clip` returned False; return whether it stepped (the same on all ranks)."""
        if taken:
            self.scaler.step(self.optimizer) if self.scaler else self.optimizer.step()
        if self.scaler:
            before = self._scale or self.scaler.get_scale()
            self.scaler.update()
            self._scale = self.scaler.get_scale()  # reading it waits for the GPU
            # GradScaler skips a step with infinite gradients. The only sign is the smaller scale.
            taken = taken and self._scale >= before
        if taken and self.unit == "step":
            self.scheduler.step()
        self.skipped += not taken
        return taken

    def step_epoch_scheduler(self, loss: float) -> None:
        """Step a per-epoch scheduler; `loss` is the value for ReduceLROnPlateau."""
        if self.unit == "epoch":
            plateau = isinstance(self.scheduler, ReduceLROnPlateau)
            self.scheduler.step(loss) if plateau else self.scheduler.step()

    def load_parts(self, saved: dict[str, Any]) -> None:
        """Restore the `parts` and the number of skipped steps from a checkpoint."""
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        self.skipped, self._scale = saved["skipped"], None

    def parts(self) -> dict[str, Any]:
        """Return the objects with a state dict, by their name in a checkpoint."""
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return {name: part for name, part in parts.items() if part is not None}


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise TypeError or ValueError unless `optimizer` is one Optimizer of `model`'s parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be one torch.optim.Optimizer, not a {type(optimizer).__name__}: with "
            "several optimizers, as for a GAN, write your own loop with wrap_model and train_loader"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS runs the model several times per step: use another optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if others := sum(id(parameter) not in own for parameter in given):
        raise ValueError(
            f"{others} of the optimizer's {len(given)} parameters are not the model's, so they "
            "are neither averaged nor saved: make everything that is trained a part of the model"
        )


def move_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Move the optimizer's state to the device of its parameters.

    Adagrad creates its state in the constructor, so before the model moves to the GPU.
    """
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _scheduler(scheduler: Any) -> tuple[Any, str | None]:
    """Return the scheduler and when it steps: "epoch" or "step"."""
    if scheduler is None:
        return None, None
    pair = scheduler if isinstance(scheduler, tuple) else (scheduler, "epoch")
    step = getattr(pair[0], "step", None)
    if len(pair) != 2 or pair[1] not in ("step", "epoch") or not callable(step):
        raise ValueError(
            f'scheduler must be a scheduler or (scheduler, "step"), not {scheduler!r:.100} (for a '
            "Lightning dict pass dict['scheduler'])"
        )
    if isinstance(pair[0], ReduceLROnPlateau):
        if pair[1] == "step":
            raise ValueError('ReduceLROnPlateau needs the loss of an epoch: pass it without "step"')
        return pair
    arguments = [p for p in inspect.signature(step).parameters.values() if p.default is p.empty]
    if needed := [p.name for p in arguments if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise ValueError(
            f"{type(pair[0]).__name__}.step() needs {', '.join(needed)}: step it in a Callback"
        )
    return pair


def _check_precision(precision: str, device: torch.device, distributed: bool) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f'precision must be "fp32", "bf16" or "fp16", not {precision!r}')
    if device.type != "cuda":
        if precision == "fp16":
            raise ValueError(f'precision="fp16" needs a CUDA device, not {device}: use "bf16"')
        return
    problem = ""
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        problem = f'{device} has no bfloat16 in hardware: use precision="fp16" or "fp32"'
    raise_on_all_ranks(problem, distributed)  # the ranks may have different GPUs
