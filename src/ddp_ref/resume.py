"""What a resumed run needs, beside its weights, to go on as if it had never ended."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .randomness import generator_state, seed_everything, set_generator_state

STATEFUL = {"optimizer", "scheduler", "scaler"}


class Generators:
    """This rank's random numbers: seeded once, or loaded, to be restored at the right moment."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self.seed, self.rank, self.device = seed, rank, device
        self._seeded = False
        self._loaded: dict[str, Any] | None = None  # and not yet restored

    def start(self) -> None:
        """Seed, at the first call: dropout differs by rank."""
        if not self._seeded:
            seed_everything(self.seed, self.rank)
            self._seeded = True

    def state(self) -> dict[str, Any]:
        """Return what `load` takes."""
        return self._loaded or generator_state(self.device)

    def load(self, state: dict[str, Any] | None, step: int) -> None:
        """Take up a `state`; None, of another world size: new numbers, from `step` on."""
        self._seeded, self._loaded = True, state
        if state is None:
            seed_everything(self.seed, self.rank, step)

    def hold(self) -> None:
        """Have `restore` set the generators to what they are now, or to what was loaded."""
        self._loaded = self.state()

    def restore(self) -> None:
        """Set the generators to what was loaded or held; to be called where the run stood then."""
        if self._loaded is not None:
            set_generator_state(self._loaded, self.device)
            self._loaded = None


def rehearse(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> None:
    """Run `loss` of `model` and its backward without a trace, before the first step of a new DDP.

    After its first backward DDP lays out the gradients anew, and on three ranks or more the layout
    decides in which order they are summed: without this, a resumed run's last bits would differ.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    generators, buffers = generator_state(device), copied_buffers(model)
    loss().backward()
    model.zero_grad()
    restore_buffers(model, buffers)
    set_generator_state(generators, device)


def copied_buffers(model: nn.Module) -> list[Tensor]:
    """Return copies of what a forward may change: statistics, as BatchNorm's."""
    return [buffer.clone() for buffer in model.buffers()]


def restore_buffers(model: nn.Module, copies: list[Tensor]) -> None:
    """Set the buffers of `model` to what `copied_buffers` returned."""
    for buffer, before in zip(model.buffers(), copies, strict=True):
        buffer.copy_(before)


def check_fits(
    where: Path, state: Mapping[str, Any], parts: Collection[str], own: Mapping[str, Any]
) -> None:
    """Raise ValueError unless `state` is of a Handler with these `parts` and these `own` values."""
    known = STATEFUL & state.keys()
    if "ranks" not in state or known != set(parts):
        raise ValueError(
            f"{where} holds the state of {', '.join(sorted(known)) or 'no optimizer'}, this "
            f"Handler has {', '.join(sorted(parts))}: make it as the one that saved was made"
        )
    for name, value in own.items():
        if state[name] != value:
            raise ValueError(
                f"{where} is of a run with the {name} {state[name]!r}, not {value!r}: make this "
                "Handler with the same, or start anew elsewhere"
            )
