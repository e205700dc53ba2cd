"""Jobs that hang for a few seconds instead of forever, and say which rank failed first."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_ref import run_ranks

WAIT = timedelta(seconds=3)  # how long a rank waits in a collective once all ranks have met
LIMIT = timedelta(minutes=2)  # for a whole job

Train = Callable[[int, DistributedDataParallel], Any]
_entered: dict[str, Any] = {}  # on each rank: its last call, and when that call began


class Hang(NamedTuple):
    """How a job ended.

    The failed call that *ended* first says little: a rank that gives up closes its connections,
    and its peers may raise before it does. So `first` is about the call that *began* first.
    """

    first: tuple[int, str] | None  # the rank whose failed call began first, and the call's name
    outcomes: list[Any]  # by rank: what `train` returned, or the text of its error


def watch(train: Train, wait: timedelta = WAIT) -> Hang:
    """Run `train(rank, model)` on two ranks until it ends or fails; say who failed first.

    Args:
        train: What each rank runs. It notes with `enter` which call comes next.
        wait: The timeout of each collective, once the model has been wrapped.

    Returns:
        The rank that failed first, and the result or error of each rank.
    """
    ranks = run_ranks(_on_rank, train, wait, timeout=LIMIT)
    failures = [(*failure, rank) for rank, (failure, _) in enumerate(ranks) if failure]
    outcomes = [outcome for _, outcome in ranks]
    if not failures:
        return Hang(None, outcomes)
    _, call, rank = min(failures)
    print(f"rank {rank} fails first, in {call}: {outcomes[rank]}")
    return Hang((rank, call), outcomes)


def enter(call: str) -> None:
    """Note the name of the call that comes next on this rank."""
    _entered.update(began=time.monotonic(), call=call)  # all processes of a host share this clock


def train_step(model: nn.Module, name: str) -> None:
    """Train on one batch: 0.1 s of work, then a backward pass with its all-reduce."""
    time.sleep(0.1)
    loss = model(torch.ones(8, 4)).mean()  # (batch, features)
    enter(name)
    loss.backward()  # the all-reduce of the gradients happens in here


def save_and_meet() -> None:
    """End a job: 1.5 s of work, then a barrier."""
    time.sleep(1.5)
    enter("barrier")
    dist.barrier()


def words(error: BaseException) -> str:
    """Return the first sentence of an error, without the addresses and files of one machine."""
    text = re.sub(r"\[[^]]*\](:\d+)?", "", str(error)).strip(" :\n")
    return f"{type(error).__name__}: " + re.split(r" ?\. | for (?:recv|send)|\n", text)[0]


def _on_rank(train: Train, wait: timedelta) -> tuple[tuple[float, str] | None, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 1))
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(wait)
    try:
        return None, train(dist.get_rank(), model)
    except (RuntimeError, ValueError, OSError) as error:
        return (_entered["began"], _entered["call"]), words(error)
