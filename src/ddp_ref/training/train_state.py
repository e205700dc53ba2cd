"""What a run needs besides its weights to resume as if it had never stopped."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..randomness import generator_state, seed_everything, set_generator_state

STATEFUL = {"optimizer", "scheduler", "scaler"}


class RngState:
    """The state of this rank's random number generators: seeded once, or loaded from a file."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self.seed, self.rank, self.device = seed, rank, device
        self._seeded = False
        self._loaded: dict[str, Any] | None = None  # loaded or captured, and not yet restored

    def start(self) -> None:
        """Seed the generators at the first call, differently on each rank, for dropout."""
        if not self._seeded:
            seed_everything(self.seed, self.rank)
            self._seeded = True

    def state(self) -> dict[str, Any]:
        """Return the state that `load` takes: plain values, for a checkpoint."""
        return self._loaded or generator_state(self.device)

    def load(self, state: dict[str, Any] | None, step: int) -> None:
        """Load what `state` returned, for `restore`.

        None means a checkpoint of another world size: the generators are seeded from `step`.
        """
        self._seeded, self._loaded = True, state
        if state is None:
            seed_everything(self.seed, self.rank, step)

    def capture(self) -> None:
        """Keep the current state for `restore`, unless a loaded state is waiting already."""
        self._loaded = self.state()

    def restore(self) -> None:
        """Set the generators to the loaded or captured state, at the point where it was taken."""
        if self._loaded is not None:
            set_generator_state(self._loaded, self.device)
            self._loaded = None


def warm_up_ddp_buckets(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> None:
    """Run one forward and backward pass so that a new DDP builds its final buckets; undo the rest.

    DDP rebuilds its buckets after the first backward pass. On three ranks or more the buckets
    decide in which order gradients are summed, so without this pass a resumed run would differ
    from the uninterrupted one in the last bits.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    rng_state, buffers = generator_state(device), copied_buffers(model)
    loss().backward()
    model.zero_grad()
    restore_buffers(model, buffers)
    set_generator_state(rng_state, device)


def copied_buffers(model: nn.Module) -> list[Tensor]:
    """Return copies of the buffers: a forward pass may change them, as BatchNorm does."""
    return [buffer.clone() for buffer in model.buffers()]


def restore_buffers(model: nn.Module, copies: list[Tensor]) -> None:
    """Set the buffers of `model` back to what `copied_buffers` returned."""
    for buffer, before in zip(model.buffers(), copies, strict=True):
        buffer.copy_(before)


def check_fits(
    where: Path, state: Mapping[str, Any], parts: Collection[str], own: Mapping[str, Any]
) -> None:
    """Raise ValueError unless this Handler can load `state`.

    Args:
        where: The checkpoint's path, for the message.
        state: The checkpoint.
        parts: The stateful parts that this Handler has, of STATEFUL.
        own: Settings of this Handler that must equal the checkpoint's.
    """
    known = STATEFUL & state.keys()
    if "ranks" not in state or known != set(parts):
        raise ValueError(
            f"{where} has the state of {', '.join(sorted(known)) or 'no optimizer'}, but this "
            f"Handler has {', '.join(sorted(parts))}: create it as the run that saved did"
        )
    for name, value in own.items():
        if state[name] != value:
            raise ValueError(
                f"{where} was saved with {name} {state[name]!r}, not {value!r}: create this "
                "Handler with the same value, or start from scratch in another folder"
            )
