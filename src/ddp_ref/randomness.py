"""Seed the global random generators, and save and restore their state."""

import hashlib
import operator
import random
import sys
from contextlib import ExitStack
from typing import Any

import torch


def seed_everything(seed: int, *parts: int) -> None:
    """Seed torch, CUDA, random and, where it is loaded, numpy from `(seed, *parts)`.

    `seed_everything(seed)` gives all ranks the same random numbers. `seed_everything(seed, rank)`
    gives each rank its own, for dropout. `seed_everything(seed, epoch, index)` gives each sample
    its own, for augmentation.

    Args:
        seed: Any integer, numpy's and negative ones included.
        *parts: More integers, such as the rank. Every combination is a seed of its own.
    """
    seed_host(seed, *parts)
    # Before CUDA is in use, as in a DataLoader's worker, torch only remembers this seed.
    torch.cuda.manual_seed_all(seed_from(seed, *parts))


def seed_host(seed: int, *parts: int) -> None:
    """Seed torch's CPU generator, random and, where it is loaded, numpy from `(seed, *parts)`."""
    number = seed_from(seed, *parts)
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 100 times as long
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


def preserved_rng_state() -> ExitStack:
    """Return a context manager that sets the CPU generators back to their state of now."""
    stack = ExitStack()
    stack.callback(set_generator_state, generator_state())
    return stack


def generator_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of the CPU generators and, if `device` is a GPU, of its generator.

    `torch.load(weights_only=True)` accepts it.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_generator_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the generators to what `generator_state` returned.

    If `device` is of another type than the saved one, this restores only the CPU generators, so
    numbers drawn on the device do not continue the saved sequence.
    """
    torch.set_rng_state(state["torch"])
    random.setstate(state["random"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_from(*parts: int) -> int:
    """Return a 64-bit seed. Different `parts` give different seeds."""
    text = ",".join(str(operator.index(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
