"""Where a run is: its progress, which is the same on all ranks, and a rank's random numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..randomness import generator_state, seed_everything, set_generator_state


@dataclass
class TrainState:
    """The progress of a run, which is the same on all ranks."""

    epoch: int = 0  # how many epochs have ended
    step: int = 0  # optimizer steps in all epochs, including skipped ones
    skipped: int = 0  # steps that were skipped because their gradients were not finite
    samples_seen: int = 0  # how many samples of this epoch all ranks together have drawn
    history: dict[str, list[float]] = field(default_factory=dict)
    #: each parameter group's settings at the start: a resume with other ones gets a warning
    settings: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # fingerprint of this epoch's data
    scheduler_due: str = ""  # the loss for ReduceLROnPlateau; "" once the scheduler has stepped

    def record(self, values: dict[str, float], names: Sequence[str]) -> None:
        """Append the values of the epoch that has ended.

        If the run was resumed without validation data, the validation lists of `names` get NaN.
        """
        missed = {f"val_{name}": math.nan for name in names if f"val_{name}" in self.history}
        for name, value in (missed | values).items():
            column = self.history.setdefault(name, [])
            column += [math.nan] * (self.epoch - 1 - len(column)) + [value]


class RngState:
    """The state of this rank's random number generators: seeded once, or loaded from a file."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self.seed, self.rank, self.device = seed, rank, device
        self._seeded = False
        self._loaded: dict[str, Any] | None = None  # loaded, and not yet restored

    def start(self) -> None:
        """Seed the generators at the first call. The ranks get different seeds, for dropout."""
        if not self._seeded:
            seed_everything(self.seed, self.rank)
            self._seeded = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators, or the one that is loaded and not yet restored."""
        return self._loaded or generator_state(self.device)

    def load_state_dict(self, state: dict[str, Any] | None, step: int) -> None:
        """Keep `state` for `restore`. If None, as at another world size, seed from `step`."""
        self._seeded, self._loaded = True, state
        if state is None:
            seed_everything(self.seed, self.rank, step)

    def restore(self) -> None:
        """Set the generators to the loaded state, at the point where it was taken."""
        if self._loaded is not None:
            set_generator_state(self._loaded, self.device)
            self._loaded = None
