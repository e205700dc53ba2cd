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
ROLL_CALL, OPENING, TAKE_OVER = "in-the-roll-call", "in-the-opening", "in-the-take-over"
HALF, HALF_OF_0 = "step-fails", "step-of-rank-0-fails"


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
        super().__init__(address)

    def build(self) -> None:
        super().build()
        VARIANTS[self.variant](self)
        images: Any = Images(self.data.images, lambda own: self.write("try", *self.share, own))
        self.data.images = images
        self.optimizer.register_step_post_hook(lambda *_: self.write("commit"))

    def write(self, kind: str, *more: Any) -> None:
        record = kind, time.monotonic(), self.group, self.step, *more
        os.write(self.log, (json.dumps(record) + "\n").encode())

    def die(self) -> None:
        self.write("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    def _next_group(self) -> Any:
        if claims(ROLL_CALL):
            self.die()
        return super()._next_group()

    def _open_group(self, group: int, rank: int, world: int, port: int) -> None:
        self.write("opens", group, rank, world)
        if claims(OPENING):
            threading.Timer(random.random() * 0.03, self.die).start()
        if rank == 0 and claims(TAKE_OVER):
            self._die_after_a_broadcast()
        super()._open_group(group, rank, world, port)

    def _die_after_a_broadcast(self) -> None:
        """Die when a part of the state is on its way, but not all of it."""
        broadcast, calls = elastic.dist.broadcast, []

        def counted(*args: Any, **kwargs: Any) -> None:
            broadcast(*args, **kwargs)
            calls.append(1)
            if len(calls) == 2:
                time.sleep(0.1)  # until it has arrived
                self.die()

        elastic.dist.broadcast = counted

    def backward(self, model: nn.Module, rank: int, world: int) -> None:
        self.share = rank, world
        time.sleep(self.pace * random.random() * 2)
        self.differentiate(model, rank, world)
        # As if the last bucket had not arrived here, while it has arrived elsewhere.
        if claims(HALF) or (rank == 0 and claims(HALF_OF_0)):
            raise RuntimeError("the drill lets this step fail here, as if gloo had")

    def differentiate(self, model: nn.Module, rank: int, world: int) -> None:
        super().backward(model, rank, world)

    def train(self) -> None:
        super().train()
        torch.save([self.step, self.model.state_dict()], f"{os.getpid()}.pt")


def plain(worker: Logged) -> None:
    """The script as it is."""


def use_buckets() -> None:
    """Each layer has a bucket of its own, so that a step has several collectives."""
    elastic.DDP = functools.partial(elastic.DDP, bucket_cap_mb=0.01)  # type: ignore


def unused(worker: Logged) -> None:
    """DDP looks for parameters without a gradient, and there is one."""
    use_buckets()
    elastic.DDP = functools.partial(elastic.DDP, find_unused_parameters=True)  # type: ignore
    worker.model.register_parameter("unused", nn.Parameter(torch.zeros(3)))


def no_sync(worker: Logged) -> None:
    """Two microbatches per step; DDP averages the gradients after the second one."""
    use_buckets()

    def differentiate(model: Any, rank: int, world: int) -> None:
        with model.no_sync():
            elastic.Worker.backward(worker, model, rank, 2 * world)
        elastic.Worker.backward(worker, model, rank + world, 2 * world)
        for parameter in model.parameters():  # each half was weighted with 2 * world
            assert parameter.grad is not None
            parameter.grad /= 2

    worker.differentiate = differentiate  # type: ignore


def batch_norm(worker: Logged) -> None:
    """The model counts its forward passes in a buffer."""
    worker.model.append(nn.BatchNorm1d(10, affine=False))


def outlive() -> None:
    """Live until the training has ended, but not for ever."""
    deadline = time.monotonic() + 60
    while not Path("elastic.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def forked(worker: Logged) -> None:
    """A forked process, such as a DataLoader's, outlives its worker: it has copies of sockets."""
    differentiate, groups = worker.differentiate, set()

    def fork_first(*args: Any) -> None:
        if worker.group not in groups:
            groups.add(worker.group)
            fork = multiprocessing.get_context("fork")
            fork.Process(target=outlive, daemon=True).start()
        differentiate(*args)

    worker.differentiate = fork_first  # type: ignore


VARIANTS = {each.__name__: each for each in (plain, unused, no_sync, batch_norm, forked)}

if __name__ == "__main__":
    sys.exit(elastic.main(Logged))
