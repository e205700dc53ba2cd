"""Checkpoint files: written atomically, checked when read, without DDP's prefixes in names."""

import errno
import io
import os
import re
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .initialize import CPU
from .model import move, unwrap_model

NAME = "step_{:09d}.pt"  # the number of optimizer steps
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
WRAPPED, COMPILED = "module.", "_orig_mod."  # what DDP and torch.compile add to names


class DamagedCheckpoint(RuntimeError):
    """The file is not a complete checkpoint."""


def write(path: str | Path, state: Mapping[str, Any]) -> None:
    """Save `state` at `path` atomically: a crash at any time leaves the old file or the new one.

    Args:
        path: The file. Folders above it are created.
        state: Tensors and plain values, in dicts, lists and tuples. NumPy's numbers are saved as
            Python's.

    Raises:
        OSError: If the file cannot be written. The old file stays.
        TypeError: If `state` has a value that `read` would reject. The old file stays.
    """
    plain = _plain(dict(state))
    path = Path(path).resolve()  # for a link, the file that it points to
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w+b") as file:
            torch.save(plain, file)
            file.flush()
            os.fsync(file.fileno())
        move_into_place(temporary, path)
    except (OSError, RuntimeError) as error:
        # After a failed write, torch.save also fails to close its archive: show the first error.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        cause.filename = cause.filename or str(path)  # a full disk does not say which file
        raise cause from None
    finally:
        temporary.unlink(missing_ok=True)


def move_into_place(temporary: Path, path: Path) -> None:
    """Give a file that is on the disk its name, also on the disk."""
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not a file system that cannot sync folders
            raise
    finally:
        os.close(folder)


def read(path: str | Path) -> dict[str, Any]:
    """Load what `write` saved, with tensors on the CPU. No code from the file is run.

    Raises:
        OSError: If there is no such file, or the disk fails.
        DamagedCheckpoint: If the file is truncated, changed, or has more than plain data.
    """
    with Path(path).open("rb") as file:
        while file.read(2**23):  # if the disk fails, it fails here; the rest is the file's fault
            pass
        try:
            # torch.load does not notice changed tensor data, so check the zip archive's checksums.
            # Where an entry has the flag of a DOS directory, it returns uninitialized memory.
            archive = zipfile.ZipFile(file)
            directories = [entry.filename for entry in archive.filelist if entry.external_attr & 16]
            if directories or (changed := archive.testzip()):
                raise RuntimeError(f"wrong flag or checksum of {directories or changed}")
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged headers can raise any type, also OSError
            raise DamagedCheckpoint(
                f"{path} is not a complete checkpoint, or has more than plain data: "
                f"{_reason(error)}"
            ) from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} has a {type(state).__name__}, but a checkpoint is a dict")
    return state


def find(path: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the file `path`, or the newest intact checkpoint in the folder `path`.

    If `path` does not exist, it counts as a file if it ends in .pt, .pth, .ckpt or .bin. There is
    a warning for each damaged file that is passed over.

    Returns:
        The checkpoint's path and state, best.pt's if there is no other; None if there is none.

    Raises:
        DamagedCheckpoint: If the file, or every checkpoint in the folder, is damaged.
        OSError: If the disk fails. The file may be intact, so no older one is loaded instead.
    """
    path = Path(path)
    if path.is_file() or (path.suffix in SUFFIXES and not path.is_dir()):
        return path, read(path)
    paths = numbered(path)
    for file in reversed(paths):
        try:
            return file, read(file)
        except DamagedCheckpoint as error:
            warnings.warn(f"{error}: trying the one before it", stacklevel=2)
    if paths:
        raise DamagedCheckpoint(
            f"all checkpoints in {path} are damaged: move them away to start from scratch"
        )
    best = path / "best.pt"  # all there is with every_epochs=None
    return (best, read(best)) if best.is_file() else None


def numbered(folder: str | Path) -> list[Path]:
    """Return the checkpoints in `folder` with a step in their name, in the order of steps."""
    paths = Path(folder).glob("step_*.pt")
    return sorted((p for p in paths if re.fullmatch(r"step_\d+", p.stem)), key=step_of)


def step_of(path: Path) -> int:
    """Return the number of optimizer steps in the name of a `numbered` checkpoint."""
    return int(path.stem.partition("_")[2])


def weights(model: nn.Module) -> dict[str, Any]:
    """Return `model`'s state dict on the CPU, without the name prefixes of DDP and torch.compile.

    Tied weights share one copy.

    Raises:
        FloatingPointError: If a buffer has a nan.
    """
    model = unwrap_model(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    state, tied = model.state_dict(), model.named_parameters(remove_duplicate=False)
    owners = {name: id(parameter) for name, parameter in tied}
    copies = move({owners.get(name, name): value for name, value in state.items()}, CPU)
    for name in buffers.keys() & copies.keys():
        if copies[name].is_floating_point() and copies[name].isnan().any():
            raise FloatingPointError(f"{name} is not finite: load an earlier checkpoint")
    return {name.replace(COMPILED, ""): copies[owners.get(name, name)] for name in state}


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into `model`; either may come from a wrapped or compiled model, or from neither.

    Raises:
        RuntimeError: If names or shapes differ, as in `load_state_dict`.
    """
    model = unwrap_model(model)
    own = {name.replace(COMPILED, ""): name for name in model.state_dict()}
    given = {name.replace(COMPILED, ""): value for name, value in state.items()}
    if given.keys() != own.keys() and all(name.startswith(WRAPPED) for name in given):
        given = {name.removeprefix(WRAPPED): value for name, value in given.items()}
    model.load_state_dict({own.get(name, name): value for name, value in given.items()})


def weights_in(path: Path, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a file that Handler did not save: all of it, or its "model"."""
    state = saved["model"] if isinstance(saved.get("model"), dict) else saved
    if not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path} has no weights, only the keys {list(saved)}: pass a checkpoint of Handler, a "
            'state dict of the model, or a dict with "model"'
        )
    return state


def check_fits(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError unless a Handler with these settings can load `saved`."""
    if saved.get("format") != own["format"]:
        raise ValueError(
            f"{path} is from another version of ddp_ref: load its weights with "
            'torch.load(path)["model"] and model.load_state_dict'
        )
    for name, value in own.items():
        if saved[name] != value:
            raise ValueError(
                f"{path} was saved with {name} {saved[name]!r}, not {value!r}: create this "
                "Handler with the same value, or take only the weights: "
                'model.load_state_dict(torch.load(path)["model"])'
            )


def check_groups(path: Path, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless the saved optimizer has as many parameters in each group."""
    groups = saved["optimizer"].get("param_groups", []), optimizer.param_groups
    theirs, own = ([len(group["params"]) for group in each] for each in groups)
    if theirs and theirs != own:  # an optimizer of the user's own may save another form
        raise ValueError(
            f"{path} was saved with groups of {theirs}, not {own} parameters: to unfreeze layers, "
            "give the optimizer all parameters from the start, in the same groups; it leaves those "
            "with requires_grad=False alone"
        )


def _plain(value: Any, name: str = "") -> Any:
    """Return `value` with Python's numbers for NumPy's; raise TypeError if `read` would reject it.

    Args:
        value: What is to be saved.
        name: Its keys in the checkpoint, for the error.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (Tensor, nn.Parameter, bool, int, float, str, bytes, type(None)):
        return value
    if type(value) in (dict, OrderedDict, Counter):
        parts = {_plain(key): _plain(part, f"{name}[{key!r}]") for key, part in value.items()}
        return type(value)(parts)
    if type(value) in (list, tuple):
        return type(value)(_plain(part, f"{name}[{n}]") for n, part in enumerate(value))
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # pickle, or a __reduce__ of the user's
        raise TypeError(
            f"a checkpoint cannot contain {name}, a {type(value).__name__}: save tensors and plain "
            f"values ({_reason(error)})"
        ) from error
    return value


def _reason(error: Exception) -> str:
    """Return the line of torch's message that names the cause."""
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    return text.strip().partition("\n")[0].partition(" Please")[0] or type(error).__name__
