"""Checkpoint files: written atomically, checked when read, without DDP's prefixes in names."""

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
from torch.serialization import get_crc32_options, set_crc32_options

from .ddp_model import unwrap_model

NAME = "step_{:09d}.pt"  # the number of optimizer steps
MARK = b"ddp_ref contents crc32 "  # and the checksum, in the zip archive's comment
NO_COMMENT = bytes(2)  # a comment length of 0, the end of an archive without a comment
CHUNK = 2**23  # bytes to collect before asking the kernel to write them
WRAPPED, COMPILED = "module.", "_orig_mod."  # what DDP and torch.compile add to names


class DamagedCheckpoint(RuntimeError):
    """The file is not a complete checkpoint."""


def write(path: str | Path, state: Mapping[str, Any]) -> None:
    """Save `state` at `path` atomically: a crash at any time leaves the old file or the new one.

    Args:
        path: The file. Folders above it are created.
        state: Tensors and plain values, in dicts, lists and tuples.

    Raises:
        OSError: If the file cannot be written. The old file stays.
        TypeError: If `state` has a value that `read` would reject. The old file stays.
    """
    path = Path(path).resolve()  # for a link, the file that it points to
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
    folder = os.open(path.parent, os.O_RDONLY)  # only this puts the new name on disk
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str | Path) -> dict[str, Any]:
    """Load what `write` saved, with tensors on the CPU. No code from the file is run.

    Raises:
        OSError: If there is no such file, or the disk fails.
        DamagedCheckpoint: If the file is truncated, changed, or has more than plain data.
    """
    with Path(path).open("rb") as file:
        try:
            _check_sums(file)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged headers can raise any type
            if failure := _failure_of_disk(error):
                raise failure from None  # the disk may recover, and the file may be intact
            raise DamagedCheckpoint(
                f"{path} is not a complete checkpoint: {_reason(error)}"
            ) from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} has a {type(state).__name__}, but a checkpoint is a dict")
    return state


def read_newest(folder: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest intact checkpoint in `folder`, with a warning for each damaged one.

    Returns:
        Its path and its state; None if the folder has no checkpoint.

    Raises:
        DamagedCheckpoint: If all checkpoints are damaged.
        OSError: If the disk fails. The file may be intact, so no older one is loaded instead.
    """
    paths = numbered(folder)
    for path in reversed(paths):
        try:
            return path, read(path)
        except DamagedCheckpoint as error:
            warnings.warn(f"{error}: trying the one before it", stacklevel=2)
    if paths:
        raise DamagedCheckpoint(
            f"all {len(paths)} checkpoints in {folder} are damaged: move them away to start from "
            "scratch"
        )
    return None


def find(path: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the file `path`, or the newest intact checkpoint in the folder `path`.

    If `path` does not exist, it counts as a file if it ends in .pt, .pth or .ckpt.
    """
    path = Path(path)
    if path.is_file() or (path.suffix in (".pt", ".pth", ".ckpt") and not path.is_dir()):
        return path, read(path)
    return read_newest(path)


def numbered(folder: str | Path) -> list[Path]:
    """Return the checkpoints in `folder` with a step in their name, in the order of steps."""
    paths = Path(folder).glob("step_*.pt")
    return sorted((p for p in paths if re.fullmatch(r"step_\d+", p.stem)), key=step_of)


def step_of(path: Path) -> int:
    """Return the number of optimizer steps in the name of a `numbered` checkpoint."""
    return int(path.stem.partition("_")[2])


def sweep(folder: str | Path) -> None:
    """Remove the temporary files of killed saves from `folder`. No other process may be saving."""
    for path in Path(folder).glob(".*.pt.*.tmp"):
        path.unlink(missing_ok=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` with the names it has without DDP and torch.compile."""
    return {_plain_name(name): value for name, value in unwrap_model(model).state_dict().items()}


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into `model`; either may come from a wrapped or compiled model, or from neither.

    Raises:
        RuntimeError: If names or shapes differ, as in `load_state_dict`.
    """
    model = unwrap_model(model)
    own = {_plain_name(name): name for name in model.state_dict()}
    given = {_plain_name(name): value for name, value in state.items()}
    if given.keys() != own.keys() and all(name.startswith(WRAPPED) for name in given):
        given = {name.removeprefix(WRAPPED): value for name, value in given.items()}
    model.load_state_dict({own.get(name, name): value for name, value in given.items()})


def check_finite(model: nn.Module) -> None:
    """Raise FloatingPointError if a weight is not finite: training cannot recover from that."""
    saved = model.state_dict().keys()
    for name, parameter in model.named_parameters():
        # The sum is one number to check. The sum of finite weights can overflow, hence the rest.
        if not torch.isfinite(parameter.sum()) and not torch.isfinite(parameter).all():
            raise FloatingPointError(
                f"{name} is not finite, so nothing is saved: load an earlier one"
            )
    for name, buffer in model.named_buffers():
        # An infinite value may be intended, as in a mask.
        if name in saved and torch.isnan(buffer).any():
            raise FloatingPointError(
                f"{name} is not a number, so nothing is saved: load an earlier one"
            )


def _plain_name(name: str) -> str:
    return name.replace(COMPILED, "")


class _Output:
    """A file for torch.save that keeps the OSError of a failed write, which torch.save hides."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.flush = file, file.flush
        self.error: OSError | None = None
        self._written = self._requested = 0  # bytes; those that the kernel was asked to write

    def write(self, data: bytes) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._written += written
        if self._written - self._requested >= CHUNK:
            self._start_writeback()
        return written

    def _start_writeback(self) -> None:
        """Ask the kernel to write to disk now, so that fsync has less to wait for."""
        start, self._requested = self._requested, self._written
        size = self._requested - start
        if sys.platform == "linux":
            with suppress(OSError):  # best effort: some kernels do not support it
                # It starts to write dirty pages and drops clean ones (mm/fadvise.c).
                os.posix_fadvise(self.file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


def _save(state: dict[str, Any], file: BinaryIO) -> None:
    output = _Output(file)
    try:
        with _checksums():
            torch.save(state, output)  # type: ignore[arg-type]  # torch.save only writes and flushes
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
    """Make torch.save write checksums, whatever this thread has set."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)


def _contents_sum(archive: zipfile.ZipFile, file: BinaryIO) -> int:
    """Return the checksum of the archive's table of contents, up to its comment."""
    end = file.seek(0, os.SEEK_END) - len(archive.comment) - len(NO_COMMENT)
    file.seek(archive.start_dir)
    return zlib.crc32(file.read(end - archive.start_dir))


def _check_sums(file: BinaryIO) -> None:
    """Raise RuntimeError if the file has changed since it was written.

    torch.load checks no checksum. A zip archive has checksums of its parts, but none of its table
    of contents: with a flipped bit there, tensors would be read from a wrong place. So `write` puts
    that checksum into the archive's comment. A file from a plain torch.save has no such comment.
    """
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise RuntimeError(f"wrong checksum of {damaged}")
        expected = archive.comment.removeprefix(MARK)
        if expected != archive.comment and _contents_sum(archive, file) != int(expected, 16):
            raise RuntimeError("wrong checksum of the table of contents")


def _failure_of_disk(error: BaseException | None) -> OSError | None:
    """Return the OSError behind `error`, if any: zipfile turns some of them into its own errors."""
    while error is not None:
        # EINVAL comes from damaged headers, which lead to a seek before the start of the file.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            return error
        error = error.__cause__ or error.__context__
    return None


def _check_readable(path: Path) -> None:
    """Raise TypeError if `read` would reject the file: now is the time to know, not on resume."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # reads no tensor
    except OSError:
        raise
    except Exception as error:
        raise TypeError(f"a checkpoint cannot contain this state: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the line of torch's message that names the cause."""
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    return text.strip().partition("\n")[0].partition(" Please")[0] or type(error).__name__
