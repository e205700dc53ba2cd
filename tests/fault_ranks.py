"""One rank of a run with a fault. test_faults.py starts it: `fault_ranks.py SCENARIO ...`.

Each rank writes its results and exceptions to rank<R>.json.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_ref.decorators import on_rank
from ddp_ref.initialize import cleanup_ddp, initialize_ddp

TIMEOUT = timedelta(seconds=6)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def one_dies(dying: str) -> None:
    """Rank 0 works for a minute, but one rank is killed."""
    if int(dying) == RANK:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    on_rank(0)(time.sleep)(60)


def stop() -> None:
    Path("stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def report(call: Callable[[], object]) -> None:
    """Append the result of the call, or its exception with the notes, to this rank's file."""
    try:
        seen = {"type": None, "text": repr(call())}
    except BaseException as error:  # noqa: BLE001 - reported
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        seen = {"type": type(error).__name__, "text": text}
    file = Path(f"rank{RANK}.json")
    before = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*before, seen]))


def interrupted(worker: str) -> None:
    """The test sends Ctrl-C to all ranks, and none of them catches it."""
    if int(worker) != RANK:
        Path(f"waits{RANK}").touch()
    on_rank(int(worker))(lambda: [Path(f"waits{RANK}").touch(), time.sleep(60)])()


def slow() -> None:
    """The work takes longer than the group's timeout, and holds the GIL all that time."""
    sleep = ctypes.PyDLL(None).sleep  # type: ignore
    report(on_rank(1, broadcast=True)(lambda: sleep(8) or "done"))
    report(usable)


def stopped(worker: str) -> None:
    """The executing rank stops in a call with `max_wait`, in one without, and before an all-reduce.

    The other ranks give up the first call, wait for the second, and fail in the all-reduce.
    """
    limit = timedelta(seconds=30 if int(worker) == RANK else 1)
    short = on_rank(int(worker), broadcast=True, max_wait=limit)
    report(short(lambda: stop() or "first"))
    report(on_rank(int(worker), broadcast=True)(lambda: stop() or "second"))
    if int(worker) == RANK:
        stop()
    report(lambda: dist.all_reduce(torch.ones(1)))


def usable() -> str:
    total = torch.ones(1)
    dist.all_reduce(total)
    return f"usable by {total.item():.0f}"


def meet() -> None:
    """Wait until every rank has imported torch, which may take longer than the timeout."""
    Path(f"here{RANK}").touch()
    while not all(Path(f"here{rank}").exists() for rank in range(WORLD)):
        time.sleep(0.05)


if __name__ == "__main__":
    meet()
    initialize_ddp(TIMEOUT)
    globals()[sys.argv[1]](*sys.argv[2:])
    cleanup_ddp()  # otherwise torch sometimes aborts, because Python ends before gloo's threads
