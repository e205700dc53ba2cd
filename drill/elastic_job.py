"""Run scripts/elastic.py, with its command line, and log each step for drill/elastic_drill.py.

The environment variable ELASTIC_DRILL holds a variant, and how long a step takes in seconds. The
drill puts files into the folder of the run. A worker that comes to the moment that a file names
takes the file away, and dies there or lets its step fail.
"""

import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # datautils and the scripts, perhaps a copy of them

from scripts import elastic  # noqa: E402

VARIABLE = "ELASTIC_DRILL"
VARIANTS = "plain", "batch_norm", "forked"
OPENING, HALF = "rank-0-dies-in-the-opening", "step-fails"


def claims(moment: str) -> bool:
    """Return whether the drill wants a fault here. Each of its files is for one worker."""
    for path in Path().glob(f"{moment}@*"):
        try:
            path.rename(f"{os.getpid()}-{path.name}")
        except FileNotFoundError:
            continue
        return True
    return False


class Images:
    """The images in float64, so that another order of a sum changes the 15th digit only."""

    def __init__(self, images: torch.Tensor, read: Any) -> None:
        self.images, self.read = images.double(), read

    def __getitem__(self, samples: torch.Tensor) -> torch.Tensor:
        self.read(samples.tolist())
        return self.images[samples]


class Logged(elastic.Worker):
    """Writes down each try and each commit of a step. What is written survives a SIGKILL."""

    def __init__(self, address: str) -> None:
        self.variant, self.pace = json.loads(os.environ[VARIABLE])
        torch.set_default_dtype(torch.float64)
        self.log = os.open(f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.share = (0, 1)
        self.forked_in = 0  # the last group in which this worker has forked a process
        super().__init__(address)

    def build(self) -> None:
        super().build()
        if self.variant == "batch_norm":  # it counts its forward passes in a buffer
            self.model.append(nn.BatchNorm1d(10, affine=False))
        elif self.variant == "forked":  # with a bucket per layer, a step has several collectives
            elastic.DDP = functools.partial(elastic.DDP, bucket_cap_mb=0.01)  # type: ignore
        images: Any = Images(self.data.images, lambda own: self.write("try", *self.share, own))
        self.data.images = images
        self.optimizer.register_step_post_hook(lambda *_: self.write("commit"))

    def write(self, kind: str, *more: Any) -> None:
        record = kind, time.monotonic(), self.group, self.step, *more
        os.write(self.log, (json.dumps(record) + "\n").encode())

    def die(self) -> None:
        self.write("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    def _open_group(self, group: int, rank: int, world: int, port: int) -> None:
        self.write("opens", group, rank, world)
        if rank == 0 and claims(OPENING):  # before, while or after it sends its state
            threading.Timer(random.random() * 0.03, self.die).start()
        super()._open_group(group, rank, world, port)

    def backward(self, model: nn.Module, rank: int, world: int) -> None:
        self.share = rank, world
        time.sleep(self.pace * random.random() * 2)
        if self.variant == "forked" and self.forked_in != self.group:
            self.forked_in = self.group
            fork = multiprocessing.get_context("fork")
            fork.Process(target=outlive, daemon=True).start()
        super().backward(model, rank, world)
        # As if the last bucket had not arrived here, while it has arrived elsewhere.
        if claims(HALF):
            raise RuntimeError("the drill lets this step fail here, as if gloo had")

    def train(self) -> None:
        super().train()
        torch.save([self.step, self.model.state_dict()], f"{os.getpid()}.pt")


def outlive() -> None:
    """Outlive the worker, as a DataLoader's worker may, with copies of its sockets.

    Live until the training has ended, but not for ever.
    """
    deadline = time.monotonic() + 60
    while not Path("elastic.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(elastic.main(Logged))
