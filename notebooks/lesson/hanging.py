"""Jobs that hang for a few seconds instead of forever, and say which rank failed first."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_ref import run_ranks

from .swimlane import Event, Lane

WAIT = timedelta(seconds=3)  # how long a rank waits in a collective once all ranks have met
LIMIT = timedelta(minutes=2)  # for a whole job

Train = Callable[[int, DistributedDataParallel, Lane], Any]


class Hang(NamedTuple):
    """How a job ended, by rank: its events, and what `train` returned or the text of its error."""

    lanes: list[list[Event]]
    outcomes: list[Any]

    @property
    def first(self) -> tuple[int, str]:
        """The rank whose failed call began first, and the label of that call.

        The call that *ended* first says little: a rank that gives up closes its connections, and
        its peers may raise before it does.
        """
        failures = [
            (events[-1].begin, rank, events[-1].label)
            for rank, events in enumerate(self.lanes)
            if events and events[-1].failed
        ]
        return min(failures)[1:]


def watch(train: Train, wait: timedelta = WAIT) -> Hang:
    """Run `train(rank, model, lane)` on two ranks until it ends or fails; say who failed first.

    Args:
        train: What each rank runs. `lane` notes when it works and when it is in a collective.
        wait: The timeout of each collective, once the model has been wrapped.

    Returns:
        The events and the result or error of each rank.
    """
    ranks = run_ranks(_on_rank, train, wait, timeout=LIMIT)
    hang = Hang([lanes for lanes, _ in ranks], [outcome for _, outcome in ranks])
    if any(events and events[-1].failed for events in hang.lanes):
        rank, place = hang.first
        print(f"rank {rank} fails first, in {place}: {hang.outcomes[rank]}")
    return hang


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer than `seconds`. Main thread only: SIGALRM."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def train_step(model: nn.Module, lane: Lane, label: str) -> None:
    """Train on one batch: 0.1 s of work, then a backward pass with its all-reduce."""
    with lane("work"):
        time.sleep(0.1)
        loss = model(torch.ones(8, 4)).mean()  # (batch, features)
    with lane("wait", label):
        loss.backward()  # the all-reduce of the gradients happens in here


def save_and_meet(lane: Lane) -> None:
    """End a job: 1.5 s of work, then a barrier."""
    with lane("work", "saves"):
        time.sleep(1.5)
    with lane("wait", "barrier"):
        dist.barrier()


def words(error: BaseException) -> str:
    """Return the first sentence of an error, without the addresses and files of one machine."""
    text = re.sub(r"\[[^]]*\](:\d+)?", "", str(error)).strip(" :\n")
    return f"{type(error).__name__}: " + re.split(r" ?\. | for (?:recv|send)|\n", text)[0]


def _on_rank(train: Train, wait: timedelta) -> tuple[list[Event], Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lane, model = Lane(), DistributedDataParallel(nn.Linear(4, 1))
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(wait)
    try:
        return lane.events, train(dist.get_rank(), model, lane)
    except (RuntimeError, ValueError, OSError) as error:
        return lane.events, words(error)
