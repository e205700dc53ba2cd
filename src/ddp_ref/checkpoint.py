"""Checkpoint files: written in one step, checked when read, weights under their bare names."""

import errno
import os
import re
import sys
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.serialization import get_crc32_options, set_crc32_options

NAME = "step_{:09d}.pt"  # the number of optimizer steps
MARK = b"ddp_ref contents crc32 "  # before that sum, in the comment of the zip archive
NO_COMMENT = bytes(2)  # the length of the comment, how an archive without one ends
CHUNK = 2**23  # bytes after which the disk is told to begin with them
WRAPPED, COMPILED = "module.", "_orig_mod."  # what DDP and torch.compile add to names


class DamagedCheckpoint(RuntimeError):
    """The file is not a whole checkpoint."""


def write(path: str | Path, state: Mapping[str, Any]) -> None:
    """Put `state` at `path` in one step: a crash at any time leaves the old file or the new one.

    Raises OSError where it cannot be written, TypeError for a value that `read` would refuse; the
    old file stays, and nothing else.
    """
    path = Path(path).resolve()  # of a link, the file that it names
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x+b") as file:
            _save(dict(state), file)
        _check_readable(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name is on disk only after this
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str | Path) -> dict[str, Any]:
    """Return what `write` put at `path`, its tensors on the CPU; no code of the file is run.

    Raises OSError where there is no file to open or it cannot be read, DamagedCheckpoint for one
    that is not a whole checkpoint: cut short, a bit changed, or with what is not plain data.
    """
    with Path(path).open("rb") as file:
        try:
            _check_sums(file)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged headers lead to any
            if failure := _failure_of_disk(error):
                raise failure from None  # it may pass, and the file may be whole
            raise DamagedCheckpoint(
                f"{path} is not a whole checkpoint: {_reason(error)}"
            ) from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} holds a {type(state).__name__}, a checkpoint is a dict")
    return state


def read_newest(folder: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the whole checkpoint with the most steps in `folder`, with its path; None without any.

    Warns of each damaged one that it passes over. Raises DamagedCheckpoint if all are, OSError
    where the disk fails: that says nothing about the file, and no older one is taken.
    """
    paths = numbered(folder)
    for path in reversed(paths):
        try:
            return path, read(path)
        except DamagedCheckpoint as error:
            warnings.warn(f"{error}: taking the one before it", stacklevel=2)
    if paths:
        raise DamagedCheckpoint(
            f"none of {len(paths)} checkpoints in {folder} is whole: move them away to start anew"
        )
    return None


def find(path: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Return what `read` finds at the file `path`, or `read_newest` in the folder `path`.

    What does not exist is a file if its name ends as those of weights do, else a folder.
    """
    path = Path(path)
    if path.is_file() or (path.suffix in (".pt", ".pth", ".ckpt") and not path.is_dir()):
        return path, read(path)
    return read_newest(path)


def numbered(folder: str | Path) -> list[Path]:
    """Return the checkpoints in `folder` that are named by their step, in that order."""
    found = [
        path for path in Path(folder).glob("step_*.pt") if re.fullmatch(r"step_\d+", path.stem)
    ]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Return the number of optimizer steps in the name of a `numbered` checkpoint."""
    return int(path.stem.partition("_")[2])


def sweep(folder: str | Path) -> None:
    """Remove what saves that were killed have left in `folder`; while no other process saves."""
    for path in Path(folder).glob(".*.pt.*.tmp"):
        path.unlink(missing_ok=True)


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of `model` under the names that it has without any wrapper."""
    return {_bare_name(name): value for name, value in bare(model).state_dict().items()}


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into `model`, whichever of the two is wrapped by DDP or compiled.

    Raises RuntimeError, as load_state_dict does, where names or shapes differ.
    """
    model = bare(model)
    own = {_bare_name(name): name for name in model.state_dict()}
    given = {_bare_name(name): value for name, value in state.items()}
    if given.keys() != own.keys() and all(name.startswith(WRAPPED) for name in given):
        given = {name.removeprefix(WRAPPED): value for name, value in given.items()}
    model.load_state_dict({own.get(name, name): value for name, value in given.items()})


def check_finite(model: nn.Module) -> None:
    """Raise FloatingPointError for weights, to be saved, that no training comes back from."""
    saved = model.state_dict().keys()
    for name, parameter in model.named_parameters():
        # The sum is one number to look at; that of finite ones may be too large, too.
        if not torch.isfinite(parameter.sum()) and not torch.isfinite(parameter).all():
            raise FloatingPointError(f"{name} is not finite: it is not saved, load an earlier one")
    for name, buffer in model.named_buffers():
        # An infinite one may be meant, such as a mask.
        if name in saved and torch.isnan(buffer).any():
            raise FloatingPointError(
                f"{name} is not a number: it is not saved, load an earlier one"
            )


def _bare_name(name: str) -> str:
    return name.replace(COMPILED, "")


class _Output:
    """A file for torch.save, which tells of a failed write only that a position is wrong."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.flush = file, file.flush
        self.error: OSError | None = None
        self._written = self._told = 0  # bytes, and those that the disk has been told of

    def write(self, data: bytes) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._written += written
        if self._written - self._told >= CHUNK:
            self._tell_disk()
        return written

    def _tell_disk(self) -> None:
        """Have the disk begin with what is written, so that fsync waits for the rest only."""
        new, self._told = self._told, self._written
        if sys.platform == "linux":
            with suppress(OSError):  # a hint: some kernels take none
                # It starts to write what is in memory, and drops what is on disk (mm/fadvise.c).
                os.posix_fadvise(self.file.fileno(), new, self._told - new, os.POSIX_FADV_DONTNEED)


def _save(state: dict[str, Any], file: BinaryIO) -> None:
    output = _Output(file)
    try:
        with _checksums():
            torch.save(state, output)  # type: ignore[arg-type]  # it writes and flushes: enough
    except RuntimeError:
        if output.error:
            raise output.error from None
        raise
    with zipfile.ZipFile(file) as archive:
        comment = MARK + f"{_contents_sum(archive, file):08x}".encode()
    file.seek(-len(NO_COMMENT), os.SEEK_END)
    file.write(len(comment).to_bytes(2, "little") + comment)
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _checksums() -> Iterator[None]:
    """Have torch.save write the checksums of the data, whatever this thread has set."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)


def _contents_sum(archive: zipfile.ZipFile, file: BinaryIO) -> int:
    """Return the checksum of the table of contents of `archive`, in `file`, up to its comment."""
    end = file.seek(0, os.SEEK_END) - len(archive.comment) - len(NO_COMMENT)
    file.seek(archive.start_dir)
    return zlib.crc32(file.read(end - archive.start_dir))


def _check_sums(file: BinaryIO) -> None:
    """Raise RuntimeError where what is read would not be what was written.

    torch.load looks at no checksum. The archive has one of each part's data, and none of its table
    of contents: with a bit of that flipped, tensors are filled from anywhere. So its comment holds
    one, but for an archive that a bare torch.save has written.
    """
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise RuntimeError(f"wrong checksum of {damaged}")
        told = archive.comment.removeprefix(MARK)
        if told != archive.comment and _contents_sum(archive, file) != int(told, 16):
            raise RuntimeError("wrong checksum of the table of contents")


def _failure_of_disk(error: BaseException | None) -> OSError | None:
    """Return what the disk said, if `error` came of it: zipfile makes another error of some."""
    while error is not None:
        # EINVAL is of a place before the file's beginning, to which damaged headers lead.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            return error
        error = error.__cause__ or error.__context__
    return None


def _check_readable(path: Path) -> None:
    """Raise TypeError for what `read` would refuse: found here, it costs no training."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # reads no tensor
    except OSError:
        raise
    except Exception as error:
        raise TypeError(f"a checkpoint cannot hold this state: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the line of torch's explanation that names the cause."""
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    return text.strip().partition("\n")[0].partition(" Please")[0] or type(error).__name__
