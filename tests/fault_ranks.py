"""One rank of a run with a fault. test_faults.py starts it: `fault_ranks.py SCENARIO`."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_ref.collectives import reduce_sum
from ddp_ref.decorators import on_rank
from ddp_ref.initialize import cleanup_ddp, initialize_ddp

TIMEOUT = timedelta(seconds=30 if sys.argv[1] == "interrupted" else 6)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WORKER = 1


def report(call: Callable[[], object]) -> BaseException | None:
    """Print the result of the call, or its exception with the notes, which is returned."""
    caught = None
    try:
        seen = repr(call())
    except BaseException as error:  # noqa: BLE001 - reported
        caught = error
        seen = f"{type(error).__name__} {[str(error), *getattr(error, '__notes__', [])]}"
    print(f"report: {seen}", flush=True)
    return caught


def slow() -> None:
    """The work takes longer than the group's timeout, and holds the GIL all that time."""
    sleep = ctypes.PyDLL(None).sleep  # type: ignore
    report(on_rank(WORKER, broadcast=True)(lambda: sleep(8) or "done"))
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"report: usable by {total.item():.0f}", flush=True)


def dies() -> None:
    """Rank 0 gets SIGKILL while it works. The others keep the error."""

    def die() -> None:
        time.sleep(1)  # the others wait already
        os.kill(os.getpid(), signal.SIGKILL)

    kept = report(on_rank(0)(die))
    time.sleep(60)
    del kept


def dies_while_rank_0_works() -> None:
    """A rank gets SIGKILL on its way to the call, in which rank 0 works for long."""
    if RANK == 3:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    kept = report(on_rank(0)(lambda: time.sleep(20)))
    time.sleep(60)
    del kept


def interrupted() -> None:
    """All ranks get Ctrl-C, those that wait first. They catch it, and go on to other calls."""
    if RANK:
        print("waits", flush=True)
    report(on_rank(0)(lambda: [print("works", flush=True), time.sleep(60)]))
    report(lambda: reduce_sum({"ranks": 1}))
    report(on_rank(0, broadcast=True)(lambda: "usable"))


def meet() -> None:
    """Wait until every rank has imported torch, which may take longer than the timeout."""
    Path(f"here{RANK}").touch()
    while not all(Path(f"here{rank}").exists() for rank in range(WORLD)):
        time.sleep(0.05)


if __name__ == "__main__":
    meet()
    initialize_ddp(TIMEOUT)
    globals()[sys.argv[1]]()
    cleanup_ddp()  # otherwise torch sometimes aborts, because Python ends before gloo's threads
