"""Checkpoint files: written atomically, checked when read, without DDP's prefixes in names."""

import errno
import io
import os
import re
import uuid
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import broadcast_object, exchange_objects
from ..decorators import on_rank
from .model import CPU, move, unwrap_model

NAME = "step_{:09d}.pt"  # the number of optimizer steps
CHUNK = 2**23  # bytes that are read, or sent to other ranks, at a time
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
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x+b") as file:
            _save(plain, file)
        _move_into_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _move_into_place(temporary: Path, path: Path) -> None:
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)  # only this puts the new name on disk
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
    return _read(Path(path))[0]


def _read(path: Path) -> tuple[dict[str, Any], int]:
    """Return what `read` does, and a checksum of the file."""
    checksum = 0
    with path.open("rb") as file:
        # If the disk fails, it fails here. What goes wrong after this is the file's fault.
        while part := file.read(CHUNK):
            checksum = zlib.crc32(part, checksum)
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
            reason = _reason(error)
            raise DamagedCheckpoint(
                f"{path} is not a complete checkpoint, or has more than plain data: {reason}"
            ) from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} has a {type(state).__name__}, but a checkpoint is a dict")
    return state, checksum


def find(path: str | Path) -> tuple[Path, dict[str, Any], int] | None:
    """Load the file `path`, or the newest intact checkpoint in the folder `path`.

    If `path` does not exist, it counts as a file if it ends in .pt, .pth, .ckpt or .bin. There is
    a warning for each damaged file that is passed over.

    Returns:
        The checkpoint's path, state and checksum; None if the folder has no checkpoint.

    Raises:
        DamagedCheckpoint: If the file, or every checkpoint in the folder, is damaged.
        OSError: If the disk fails. The file may be intact, so no older one is loaded instead.
    """
    path = Path(path)
    if path.is_file() or (path.suffix in (".pt", ".pth", ".ckpt", ".bin") and not path.is_dir()):
        return path, *_read(path)
    paths = numbered(path)
    for file in reversed(paths):
        try:
            return file, *_read(file)
        except DamagedCheckpoint as error:
            warnings.warn(f"{error}: trying the one before it", stacklevel=2)
    if paths:
        raise DamagedCheckpoint(f"all checkpoints in {path} are damaged: move them away to restart")
    return None


def find_on_all_ranks(path: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Return on all ranks what `find` returns on rank 0 (collective).

    Each rank reads the file that rank 0 chooses, if it sees the same one. If some do not, as on a
    node with a disk of its own, rank 0 sends the file's bytes, part by part.
    """
    newest = on_rank(0)(find)(path)  # None on the other ranks
    chosen = broadcast_object((newest[0], newest[2]) if newest else None)
    if chosen is None:
        return None
    file, checksum = chosen
    state, own = newest[1:] if newest else ({}, None)
    if not newest:
        with suppress(OSError, DamagedCheckpoint):
            state, own = _read(file)
    missing = own != checksum
    if any(exchange_objects(missing)):
        content = _broadcast_bytes(file, keep=missing)
        if missing:
            state = torch.load(content, map_location="cpu", weights_only=True)
    return file, state


def _broadcast_bytes(file: Path, keep: bool) -> io.BytesIO:
    """Return rank 0's `file` on all ranks that `keep` it (collective)."""
    content = io.BytesIO()
    with file.open("rb") if dist.get_rank() == 0 else nullcontext() as source:
        while part := broadcast_object(source and source.read(CHUNK)):
            content.write(part if keep else b"")
    content.seek(0)
    return content


def numbered(folder: str | Path) -> list[Path]:
    """Return the checkpoints in `folder` with a step in their name, in the order of steps."""
    paths = Path(folder).glob("step_*.pt")
    return sorted((p for p in paths if re.fullmatch(r"step_\d+", p.stem)), key=step_of)


def step_of(path: Path) -> int:
    """Return the number of optimizer steps in the name of a `numbered` checkpoint."""
    return int(path.stem.partition("_")[2])


def remove_temporary_files(folder: str | Path) -> None:
    """Remove temporary files of interrupted saves from `folder`. No process may be saving there."""
    for path in Path(folder).glob(".*.pt.*.tmp"):
        path.unlink(missing_ok=True)


def weights(model: nn.Module) -> dict[str, Any]:
    """Return `model`'s state dict on the CPU, without the name prefixes of DDP and torch.compile.

    Tied weights share one copy.
    """
    model = unwrap_model(model)
    state, tied = model.state_dict(), model.named_parameters(remove_duplicate=False)
    owners = {name: id(parameter) for name, parameter in tied}
    copies = move({owners.get(name, name): value for name, value in state.items()}, CPU)
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
                "Handler with the same value, or start from scratch in another folder"
            )


def weights_in(path: Path, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a file that Handler did not save: all of it, or its "model"."""
    state = saved["model"] if isinstance(saved.get("model"), dict) else saved
    if not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path} has no weights, only the keys {list(saved)}: pass a checkpoint of Handler, a "
            'state dict of the model, or a dict with "model"'
        )
    return state


def check_finite(model: nn.Module) -> None:
    """Raise FloatingPointError if a weight is not finite: training cannot recover from that."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    wrong: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or not value.numel():
            continue  # extra state need not be a tensor
        real = torch.view_as_real(value) if value.is_complex() else value
        if real.is_floating_point():
            # Minimum and maximum are both nan if any element is. isfinite would take 20 times as
            # long. float8 types, with one byte per element, have no aminmax.
            ends = torch.stack((real.float() if real.element_size() == 1 else real).aminmax())
            # A buffer, such as a mask, may be infinite on purpose, so there only nan is an error.
            wrong[name] = (ends.isnan() if name in buffers else ~ends.isfinite()).any()
    # Read at once, not one by one, because each read waits for the GPU.
    flags = torch.stack([f.to(ends.device) for f in wrong.values()]).tolist() if wrong else []
    for name in (name for name, flag in zip(wrong, flags, strict=True) if flag):
        raise FloatingPointError(
            f"{name} is not finite: load an earlier checkpoint and lower the learning rate"
        )


def _save(state: dict[str, Any], file: BinaryIO) -> None:
    """Write `state`, and wait until it is on the disk."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # After a failed write, torch.save also fails to close its archive: show the first error.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    file.flush()
    os.fsync(file.fileno())


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
