"""Everything that stays the same in the four scripts: data, flags and files.

Data: `MyTrainDataset`, `digits`, `load_dataset`, `count_right`.
Flags: `parse_args`.
Files: `read_checkpoint`, `check_fits`, `write_checkpoint`.
"""

import argparse
import errno
import math
import os
import sys
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed.nn  # not later: while a group is open, this would keep it alive
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class MyTrainDataset(Dataset[tuple[Tensor, Tensor]]):
    """Hold `size` pairs: a random input (20,), and as target (1,) a fixed linear function of it.

    The inputs depend only on `seed`, so every rank builds the same data set. The function is the
    same for every seed, so a model that was trained on one seed can be tested on another.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.inputs = torch.rand(size, 20, generator=torch.Generator().manual_seed(seed))
        weight = torch.linspace(-1, 1, 20)
        self.targets = self.inputs @ weight[:, None] + 0.5  # (size, 20) @ (20, 1) -> (size, 1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def digits(split: str) -> TensorDataset:
    """Return the "train" (1,440) or "test" (357) part of scikit-learn's 1,797 handwritten digits.

    An item is an image and its digit. The image (64,) holds the 8x8 pixels row by row, scaled to
    0..1 (float32). The digit is a scalar from 0 to 9 (int64). The split is stratified, and it is
    the same on every rank and in every run.
    """
    parts = _split_digits()
    if split not in parts:
        raise ValueError(f'split must be "train" or "test", not {split!r}')
    return parts[split]


@cache
def _split_digits() -> dict[str, TensorDataset]:
    images, labels = load_digits(return_X_y=True)  # (1797, 64) with values 0..16, (1797,)
    parts = train_test_split(images, labels, test_size=357, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = map(torch.from_numpy, parts)
    return {
        "train": TensorDataset(train_x.float() / 16, train_y.long()),
        "test": TensorDataset(test_x.float() / 16, test_y.long()),
    }


def load_dataset(name: str) -> tuple[Dataset, Dataset, tuple[int, int], Callable[..., Tensor]]:
    """Return the train set, the test set, (inputs, outputs) of the model, and the loss function.

    `name` is "digits" or "toy". The loss function returns the mean over a batch.
    """
    if name == "digits":
        return digits("train"), digits("test"), (64, 10), F.cross_entropy
    return MyTrainDataset(2048, seed=0), MyTrainDataset(512, seed=1), (20, 1), F.mse_loss


@torch.no_grad()
def count_right(model: nn.Module, data: DataLoader, device: torch.device) -> Tensor:
    """Return the number of right answers of `model` and of all its answers, (2,) on `device`.

    An answer is the class with the largest output. If the targets are floats, an answer is right
    if it is within 0.1 of its target. The model is evaluated in `eval()` mode.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in data:  # (batch, features), and (batch,) classes or (batch, 1) numbers
        outputs, targets = model(inputs.to(device)), targets.to(device)
        is_class = targets.dtype == torch.int64
        right = outputs.argmax(1) == targets if is_class else (outputs - targets).abs() < 0.1
        totals[0] += right.sum()  # adding on the device does not make the CPU wait
        totals[1] += len(targets)
    model.train(was_training)
    return totals


def parse_args(description: str | None, checkpoint: str, nproc: int = 0) -> argparse.Namespace:
    """Parse the flags of all scripts. For a wrong value, print one line and exit with code 2.

    `checkpoint` is the default path. If `nproc` is above 0, the script has the flag --nproc, and
    this is its default. Each process takes seconds and hundreds of MB to start. So more than one
    process per core causes a warning, and more than 4 per core an error (16 are always allowed).
    """
    parser = argparse.ArgumentParser(
        description=description,
        usage=argparse.SUPPRESS,  # so that an error is one line, without the list of all flags
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, _number(int, 1, 2**31 - 1)
    add("--epochs", type=count, default=20, help="passes over the training set (20)")
    add("--batch-size", type=count, default=32, help="samples per rank and step (32)")
    add("--save-every", type=count, default=5, help="epochs between two saves (5)")
    rate = _number(float, sys.float_info.min, sys.float_info.max)
    add("--lr", type=rate, default=0.1, help="learning rate (0.1); a snapshot's own rate wins")
    seed = _number(int, 0, 2**32 - 1)
    add("--seed", type=seed, default=0, help="for initial weights and sample order (0)")
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: GPUs if there are enough",
    )
    add("--dataset", choices=["digits", "toy"], default="digits", help="default: digits")
    add(
        "--checkpoint",
        type=Path,
        default=checkpoint,
        metavar="PATH",
        help=f"file to save ({checkpoint})",
    )
    if nproc:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        most = max(16, 4 * cores)
        few = _number(int, 1, most, " (4 per CPU core, or 16 if that is more)")
        add(
            "--nproc", type=few, default=nproc, help=f"processes to start ({nproc}); {most} at most"
        )
    args = parser.parse_args()
    if nproc and args.nproc > cores:
        slow = f"warning: --nproc {args.nproc} is slow: the processes share {cores} CPU cores"
        print(slow, file=sys.stderr, flush=True)
    return args


def _number(
    kind: type[int] | type[float], low: float, high: float, why: str = ""
) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"needs {what}, not {text}")
        return value

    what = "a finite number above 0" if kind is float else f"an integer from {low} to {high}{why}"
    return parse


def read_checkpoint(path: Path, *keys: str) -> dict[str, Any] | None:
    """Return the content of the checkpoint at `path`, or None if there is no file yet.

    The content must have exactly these `keys`. Without `keys`, it must be a model's weights by
    name. If the file is anything else, a save would destroy it, so the script exits with one line.
    It also exits if it cannot write to `path`.
    """
    try:
        temporary = _temporary(path)
        temporary.open("xb").close()
        temporary.unlink()
        if not path.exists():
            return None
        with path.open("r+b") as file:
            content = _load(file)
    except OSError as error:
        _exit(f"cannot write {path}: {error.strerror or error}")
    if not isinstance(content, dict) or not _holds(content, keys):
        what = f"a checkpoint with {', '.join(keys)}" if keys else "a checkpoint of weights alone"
        _exit(f"{path} exists but is not {what}: move it away or choose another --checkpoint")
    return content


def check_fits(path: Path, snapshot: dict[str, Any] | None, model: nn.Module) -> None:
    """Exit with one line if the weights in `snapshot` do not fit this `model`."""
    if snapshot is None:
        return
    found, own = snapshot["model"], model.state_dict()
    shapes = {name: getattr(value, "shape", 0) for name, value in own.items()}
    if (
        not isinstance(found, dict)
        or {n: getattr(v, "shape", 0) for n, v in found.items()} != shapes
    ):
        _exit(f"{path} holds another model's weights: choose its --dataset or another --checkpoint")


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Put `content` at `path` in one step, so that a crash leaves a whole file, old or new."""
    temporary = _temporary(path)
    try:
        with temporary.open("xb") as file:
            torch.save(_on_cpu(content), file)
            file.flush()
            os.fsync(file.fileno())
        # Fail now, and not on resume, if `content` has something that torch.load rejects.
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        temporary.replace(path.resolve())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(temporary.parent, os.O_RDONLY)  # the new name is on disk only after this
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync folders
            raise
    finally:
        os.close(folder)


def _on_cpu(value: Any) -> Any:
    """Copy the tensors in `value` to the CPU, so that a machine without GPUs can load the file."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(part) for key, part in value.items()}
    return [_on_cpu(part) for part in value] if isinstance(value, list) else value


def _temporary(path: Path) -> Path:
    """Return a new name for each save, in the folder of the file (not of a link to it)."""
    return path.resolve().with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def _load(file: BinaryIO) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - arbitrary bytes can raise anything; the caller names the file
        return None


def _holds(content: dict[str, Any], keys: tuple[str, ...]) -> bool:
    if keys:
        return content.keys() == set(keys)
    named = all(isinstance(name, str) for name in content)
    return bool(content) and named and all(isinstance(value, Tensor) for value in content.values())


def _exit(message: str) -> NoReturn:
    sys.exit(f"error: {message}")
