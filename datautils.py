"""What the scripts share: the data, the accuracy, the command line and the files."""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed.nn  # not later: while a group is open, this would keep it alive
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset


class MyTrainDataset(TensorDataset):
    """1,440 handwritten digits to train on, or 357 others to test: images (64,) in 0..1, digits."""

    def __init__(self, *, train=True):
        images, digits = load_digits(return_X_y=True)
        parts = train_test_split(images, digits, test_size=357, stratify=digits, random_state=0)
        images, digits = parts[0::2] if train else parts[1::2]
        self.images, self.digits = torch.from_numpy(images).float() / 16, torch.from_numpy(digits)
        super().__init__(self.images, self.digits)


@torch.no_grad()
def count_right(model, data, device):
    """Return how many digits of `data` the model gets right, and how many there are, (2,)."""
    model.eval()
    totals = torch.zeros(2, device=device)
    for source, targets in data:
        totals[0] += (model(source.to(device)).argmax(1) == targets.to(device)).sum()
        totals[1] += len(targets)
    return totals


def parse_args(description, nproc=False, launched=False):
    """Parse the tutorial series' command line, and perhaps --nproc; a wrong value is one line."""
    parser = argparse.ArgumentParser(description=description, usage=argparse.SUPPRESS)
    parser.add_argument("total_epochs", type=int, nargs="?", default=20, help="default: 20")
    parser.add_argument("save_every", type=int, nargs="?", default=5, help="in epochs, default: 5")
    parser.add_argument("--batch_size", type=int, default=32, help="per process, default: 32")
    if nproc:
        most = max(2, torch.cuda.device_count())
        parser.add_argument("--nproc", type=int, default=most, help="default: one per GPU, or 2")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if value < 1:
            parser.error(f"{name} must be at least 1, not {value}")
    if launched is not None and launched != ("LOCAL_WORLD_SIZE" in os.environ):  # by torchrun
        parser.error(f"start with {'torchrun' if launched else 'python'}, as the first line shows")
    return args


def describe(device, processes, steps):
    """Return the first line to print. It says why processes train on the CPU beside a GPU."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or processes  # on this machine
    where, gpus = device.type, torch.cuda.device_count()
    if where == "cpu" and gpus:
        where += f" ({gpus} GPU{'s' * (gpus > 1)} for {here} processes)"
    return f"processes: {processes} | device: {where} | steps per epoch: {steps}"


def on_cpu(content):
    """Copy the tensors to the CPU: a file that names a GPU loads only where there is one."""
    if isinstance(content, dict):
        return {key: on_cpu(value) for key, value in content.items()}
    return content.cpu() if isinstance(content, torch.Tensor) else content


def save(path, content, epoch):
    """Replace the file at `path` in one step: first, each process writes a file of its own."""
    with Path(f"{path}.{os.uname().nodename}.{os.getpid()}.tmp").open("wb") as file:
        torch.save(on_cpu(content), file)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)
    print(f"saved {path} after epoch {epoch}")


def load(path, model):
    """Load the weights from the snapshot at `path`, and return the rest; None without a file."""
    if not Path(path).exists():
        return None
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["model"])
        return {key: snapshot[key] for key in ("optimizer", "epochs_run")}
    except Exception as error:  # noqa: BLE001 - a file of another program can raise anything
        sys.exit(f"error: {path} is no snapshot of this model, move it away ({error!r:.60})")
