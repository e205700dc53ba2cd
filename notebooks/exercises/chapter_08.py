"""The exercises of chapter 08: ranks with unequal shards, and a file that one rank prepares."""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WAIT = timedelta(seconds=5)  # far above what a healthy collective takes here
BATCHES = [3, 5]  # of each rank
RATE = 0.01
MOVED = 15.0  # batch n has the gradient n for each weight: the means of both ranks are 1 to 5


class Epoch(NamedTuple):
    """What `train_epoch` did on a rank; `weight` is None where a collective found no partner."""

    weight: Tensor | None
    moved: float = 0.0  # by the weight, over the learning rate
    returned: object = None
    drawn: int = 0


class Counted:
    """Batches that count how many of them were drawn."""

    def __init__(self, number: int) -> None:
        self.number, self.drawn = number, 0

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.number):
            self.drawn += 1
            yield torch.full((8, 4), number + 1.0)


def observe_train_epoch(train_epoch: Callable[..., Any]) -> Epoch:
    torch.manual_seed(0)
    _open_group()
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches, start = Counted(BATCHES[dist.get_rank()]), model.module.weight.detach().clone()
    try:
        returned = train_epoch(model, optimizer, batches)
        dist.barrier()  # what a job does next, whatever it is
    except RuntimeError as error:
        if not _found_no_partner(error):
            raise
        return Epoch(None)
    weight = model.module.weight.detach()
    return Epoch(weight, ((start - weight) / RATE).mean().item(), returned, batches.drawn)


def judge_train_epoch(seen: list[Epoch]) -> str | None:
    weights = [epoch.weight for epoch in seen if epoch.weight is not None]
    if len(weights) < len(seen):
        return "a rank that still has batches waits for a rank that has none left"
    drawn = [epoch.drawn for epoch in seen]
    if drawn != BATCHES:
        return f"the ranks have {BATCHES} batches, and took {drawn} of them"
    if not torch.equal(*weights):
        return "every batch is used, but the ranks end with different weights"
    moved = seen[0].moved
    if abs(moved - MOVED) > 0.1:
        return f"the mean gradients add up to {MOVED}, the steps taken to {moved:.1f}"
    returned = [epoch.returned for epoch in seen]
    if returned != BATCHES:
        return f"the ranks trained on {BATCHES} batches, and return {returned}"
    return None


class Preparation(NamedTuple):
    """What `first_on_rank_0` did on a rank."""

    calls: int
    found_ready: bool  # at the first call
    stuck: bool


def observe_first_on_rank_0(first_on_rank_0: Callable[..., Any]) -> Preparation:
    _open_group()
    shared = [tempfile.mkdtemp(prefix="ddp-exercise-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        atexit.register(shutil.rmtree, shared[0], ignore_errors=True)
    ready = Path(shared[0]) / "ready"
    found: list[bool] = []

    def prepare() -> None:
        found.append(ready.exists())
        if not found[-1]:
            time.sleep(3)  # a download: longer than a rank would wait by the clock
            ready.with_name(f"part {os.getpid()}").touch()
            ready.with_name(f"part {os.getpid()}").replace(ready)

    stuck = False
    try:
        first_on_rank_0(prepare)
        dist.all_reduce(torch.zeros(1))  # what a job does next, whatever it is
    except RuntimeError as error:
        if not _found_no_partner(error):
            raise
        stuck = True
    return Preparation(len(found), bool(found) and found[0], stuck)


def judge_first_on_rank_0(seen: list[Preparation]) -> str | None:
    if any(preparation.stuck for preparation in seen):
        return "a rank waits in a collective that the other rank does not call"
    first, other = seen
    if not first.calls:
        return "rank 0 has not called prepare()"
    if first.found_ready:
        return "rank 1 did the work, and rank 0 came after it"
    if not other.calls:
        return "rank 1 has not called prepare(): it has no data"
    if not other.found_ready:
        return "rank 1 called prepare() before rank 0 had ended it"
    if (first.calls, other.calls) != (1, 1):
        return f"prepare() is called {first.calls} times on rank 0 and {other.calls} on rank 1"
    return None


def _open_group() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(WAIT)  # from here on, so that a slow start is not taken for a hang


def _found_no_partner(error: RuntimeError) -> bool:
    return any(words in str(error) for words in ("Timed out waiting", "Connection closed"))


EXERCISES = {
    "train_epoch": Exercise(observe_train_epoch, judge_train_epoch),
    "first_on_rank_0": Exercise(observe_first_on_rank_0, judge_first_on_rank_0),
}
