"""Where a run is, and everything besides its weights that a checkpoint holds."""

import math
from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives import gather_objects
from ..randomness import generator_state, seed_everything, set_generator_state
from .batches import CPU, move, use_device
from .checkpoint import load_weights, weights
from .loss_and_metrics import RunningSums

SAVED = ("epoch", "step", "samples_seen", "history", "data", "due_loss")


@dataclass
class TrainState:
    """The progress of a run."""

    sums: RunningSums  # of this epoch, on this rank
    epoch: int = 0  # how many epochs have ended
    step: int = 0  # optimizer steps in all epochs, with those that were skipped
    samples_seen: int = 0  # how many samples of this epoch all ranks together have drawn
    history: dict[str, list[float]] = field(default_factory=dict)
    data: dict[str, int | None] = field(default_factory=dict)  # fingerprint of this epoch's data
    running: dict[str, float] = field(default_factory=dict)  # this epoch's means, latest summary
    due_loss: float | None = None  # of an ended epoch, for which the scheduler has yet to step
    warmed_up: bool = True  # False only between a resume and the first step after it

    def record(self, values: dict[str, float], names: Sequence[str]) -> None:
        """Append the values of the epoch that has ended, and NaN to a list that gets none.

        That is a validation list of `names`, in a run that was resumed without validation data.
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
        """Use the device in this thread, and seed the generators at the first call.

        The ranks get different seeds, for dropout.
        """
        use_device(self.device)
        if not self._seeded:
            seed_everything(self.seed, self.rank)
            self._seeded = True

    def state(self) -> dict[str, Any]:
        """Return the state that `load` takes, for a checkpoint.

        Tuples are stored as strings: every rank loads the states of all ranks, and torch.load
        reads a string 20 times as fast as a tuple.
        """
        state = self._loaded or generator_state(self.device)
        return {n: repr(v) if isinstance(v, tuple) else v for n, v in state.items()}

    def load(self, state: dict[str, Any] | None, step: int) -> None:
        """Load what `state` returned, for `restore`.

        None means a checkpoint of another world size: the generators are seeded from `step`.
        """
        self._seeded, self._loaded = True, state
        if state is None:
            seed_everything(self.seed, self.rank, step)

    def restore(self) -> None:
        """Set the generators to the loaded state, at the point where it was taken."""
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            state = {n: literal_eval(v) if isinstance(v, str) else v for n, v in state.items()}
            set_generator_state(state, self.device)


def capture(handler: Any) -> dict[str, Any] | None:
    """Return on rank 0 what a checkpoint holds, with all tensors on the CPU (collective).

    A checkpoint that named a GPU could not be loaded on a machine without one.
    """
    own = move({"rng": handler.rng.state(), "sums": handler.state.sums.state_dict()}, CPU)
    ranks = gather_objects(own) if handler.info.distributed else [own]
    if ranks is None:
        return None
    return {
        "model": weights(handler.model),
        "ranks": ranks,
        "skipped": handler.skipped,
        **_identity(handler),
        **{name: getattr(handler.state, name) for name in SAVED},
        **{n: move(p.state_dict(), CPU) for n, p in handler.optimizer_step.parts().items()},
    }


def restore(handler: Any, path: Path, saved: dict[str, Any]) -> None:
    """Continue the run whose `capture` was saved in `path`, also at another world size.

    From a file that Handler did not write, load only the weights, and the optimizer's state if the
    file has it.
    """
    if saved.keys().isdisjoint(("ranks", "samples_seen")):
        _load_other_file(handler, path, saved)
        return
    state = handler.state
    _check_fits(path, saved, _identity(handler))
    load_weights(handler.model, saved["model"])
    handler.optimizer_step.load_parts(saved)
    for name in SAVED:
        setattr(state, name, saved[name])
    rank, world_size, ranks = handler.rank, handler.info.world_size, saved["ranks"]
    same_world = len(ranks) == world_size
    handler.rng.load(ranks[rank]["rng"] if same_world else None, state.step)
    # At another world size, gradients are summed in another order anyway.
    state.warmed_up = not same_world or state.step == 0
    state.running = {}
    state.sums = handler.loss_and_metrics.new_sums(handler.info.distributed)
    for past in ranks[rank::world_size]:  # at another world size, a share of the sums
        state.sums.add_state(past["sums"], with_objects=same_world)


def _load_other_file(handler: Any, path: Path, saved: dict[str, Any]) -> None:
    """Load plain weights, or a dict of "model" and perhaps "optimizer" such as snapshot.pt."""
    state = saved["model"] if isinstance(saved.get("model"), dict) else saved
    if not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path} has no weights, only the keys {list(saved)}: pass a checkpoint of Handler, a "
            'state dict of the model, or a dict with "model" and "optimizer"'
        )
    taken, given = "weights", saved.get("optimizer")
    if isinstance(given, dict):
        taken = "weights and optimizer state"
        given = _with_own_settings(path, handler.optimizer, given)
    load_weights(handler.model, state)
    if isinstance(given, dict):
        handler.optimizer.load_state_dict(given)
    handler.log(f"{path} is not from Handler.save: taking its {taken} only")


def _with_own_settings(path: Path, optimizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the state `given`, with the learning rate and other settings of `optimizer`."""
    own, theirs = optimizer.state_dict().get("param_groups", []), given.get("param_groups", [])
    sizes = [[len(group["params"]) for group in groups] for groups in (own, theirs)]
    if sizes[0] != sizes[1] or any(optimizer.defaults.keys() - group for group in theirs):
        raise ValueError(
            f"{path} has the state of another optimizer than this {type(optimizer).__name__}: load "
            'its weights alone, from a file with torch.load(path)["model"]'
        )
    return given | {"param_groups": own}


def _check_fits(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError unless a Handler with these settings can load `saved`."""
    if missing := [name for name in ("ranks", *SAVED, *own) if name not in saved]:
        raise ValueError(
            f"{path} has no {missing[0]!r}, so this version of Handler.save did not write it: load "
            "its weights with torch.load and model.load_state_dict"
        )
    for name, value in own.items():
        if saved[name] != value:
            raise ValueError(
                f"{path} was saved with {name} {saved[name]!r}, not {value!r}: create this "
                "Handler with the same value, or start from scratch in another folder"
            )


def _identity(handler: Any) -> dict[str, Any]:
    """Return the settings that a checkpoint and the Handler that loads it must share."""
    return {
        "seed": handler.seed,
        "metrics": list(handler.metrics),
        "parts": {n: type(part).__name__ for n, part in handler.optimizer_step.parts().items()},
        "scheduler_steps_per": handler.optimizer_step.unit,
    }
