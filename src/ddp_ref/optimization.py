"""One optimizer step: precision, clipping, gradients that are not finite, the schedule."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Optimization:
    """What is done with a loss: `backward` for each batch of a step, then `step` once.

    `scheduler` steps per epoch, as (scheduler, "step") per step taken. Raises ValueError for a
    setting that is not there, or not on `device`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        device: torch.device,
        *,
        clip_norm: float | None,
        precision: str,
        on_nonfinite: str,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, or None, not {clip_norm!r}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS runs the model several times a step: Handler runs it once")
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f'on_nonfinite must be "raise" or "skip", not {on_nonfinite!r}')
        _check_precision(precision, device)
        self.optimizer, self.device, self.precision = optimizer, device, precision
        self.scheduler, self.unit = _scheduler(scheduler)
        self.clip_norm, self.skip_nonfinite = clip_norm, on_nonfinite == "skip"
        self.scaler = torch.amp.GradScaler() if precision == "fp16" else None
        self.skipped = 0  # steps

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward pass has this precision, whatever is around it."""
        kind, enabled = self.device.type, self.precision != "fp32"
        if not enabled and not torch.is_autocast_enabled(kind):
            return nullcontext()  # it costs a small step less than to switch off what is off
        return torch.autocast(kind, PRECISIONS[self.precision], enabled=enabled)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self) -> bool:
        """Clip and step; return whether the step was taken, which all ranks decide alike."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        taken = self._clip()
        if taken:
            self.scaler.step(self.optimizer) if self.scaler else self.optimizer.step()
        if self.scaler:
            before = self.scaler.get_scale()
            self.scaler.update()
            # It takes no step with infinite gradients, and tells so by a smaller scale alone.
            taken = taken and self.scaler.get_scale() >= before
        if taken and self.unit == "step":
            self.scheduler.step()
        self.skipped += not taken
        return taken

    def end_epoch(self, loss: float) -> None:
        """Step a scheduler that steps per epoch; `loss` is what a ReduceLROnPlateau looks at."""
        if self.unit == "epoch":
            plateau = isinstance(self.scheduler, ReduceLROnPlateau)
            self.scheduler.step(loss) if plateau else self.scheduler.step()

    def parts(self) -> list[tuple[str, Any]]:
        """Return what has a state, by its name in a checkpoint."""
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return [(name, part) for name, part in parts.items() if part is not None]

    def _clip(self) -> bool:
        """Clip the gradients; return False where they are not finite and such steps are skipped."""
        if self.clip_norm is None and not self.skip_nonfinite:
            return True
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.skip_nonfinite and not torch.isfinite(norm):  # reduced: the same on all ranks
            return False
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
        return True


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ValueError where `optimizer` has parameters that are not those of `model`."""
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if others := sum(id(parameter) not in own for parameter in given):
        raise ValueError(
            f"{others} of the optimizer's {len(given)} parameters are not the model's: such are "
            "neither averaged over the ranks nor saved; make the optimizer of model.parameters() "
            "as they are now, and whatever else is trained a part of the model"
        )


def _scheduler(scheduler: Any) -> tuple[Any, str | None]:
    """Return the scheduler, and "epoch" or "step": when it steps."""
    if scheduler is None:
        return None, None
    if not isinstance(scheduler, tuple):
        return scheduler, "epoch"
    if len(scheduler) != 2 or scheduler[1] not in ("step", "epoch"):
        raise ValueError(f'scheduler must be one, or (scheduler, "step"), not {scheduler!r}')
    if isinstance(scheduler[0], ReduceLROnPlateau) and scheduler[1] == "step":
        raise ValueError('ReduceLROnPlateau looks at an epoch\'s loss: give it without "step"')
    return scheduler


def _check_precision(precision: str, device: torch.device) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f'precision must be "fp32", "bf16" or "fp16", not {precision!r}')
    cuda = device.type == "cuda"
    if precision == "fp16" and not cuda:
        raise ValueError(f'precision="fp16" needs a CUDA device, not {device}: use "bf16"')
    if precision == "bf16" and cuda and not torch.cuda.is_bf16_supported():
        raise ValueError(f'{device} has no bfloat16: use precision="fp16" or "fp32"')
