"""One rank of a run that goes wrong: `fault_ranks.py SCENARIO ...`, started by test_faults.py.

What a rank sees is written to rank<R>.json: the exception, and when it came.
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

from ddp_ref import _outcomes
from ddp_ref.decorators import on_rank
from ddp_ref.initialize import cleanup_ddp, initialize_ddp

TIMEOUT = timedelta(seconds=6)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def die(how: str) -> None:
    time.sleep(0.3)  # the others are waiting by now
    Path("fault_at").write_text(str(time.time()))
    if how == "exit":
        os._exit(9)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)


def stop() -> None:
    Path("stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def report(call: Callable[[], object]) -> None:
    """Write what the call raised, with its notes, or its result."""
    try:
        seen = {"type": None, "text": repr(call())}
    except BaseException as error:  # noqa: BLE001 - reported
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        seen = {"type": type(error).__name__, "text": text}
    file = Path(f"rank{RANK}.json")
    before = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*before, seen | {"at": time.time()}]))


def dies(how: str, worker: str) -> None:
    """The working rank ends in the body."""
    report(on_rank(int(worker))(lambda: die(how)))


def dies_among_workers(how: str, worker: str) -> None:
    """One of two working ranks ends, the other works on until the third has felt it."""
    dying, other, waiting = ((int(worker) + offset) % WORLD for offset in range(3))

    def body() -> None:
        if dying == RANK:
            die(how)
        deadline = time.monotonic() + 20
        while not Path(f"rank{waiting}.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if time.monotonic() < deadline:
            Path("felt").touch()

    report(on_rank([dying, other])(body))


def waiter_dies(how: str, worker: str) -> None:
    """A rank that waits ends."""
    if (int(worker) + 1) % WORLD == RANK:
        threading.Thread(target=die, args=(how,), daemon=True).start()
    report(on_rank(int(worker))(lambda: time.sleep(1.5)))


def dies_between_calls(dying: str) -> None:
    """A rank ends after a first call."""
    on_rank(0)(int)()
    if int(dying) == RANK:
        die("exit")
    time.sleep(1.5)  # so it is gone
    report(on_rank(0, max_wait=timedelta(seconds=4))(int))
    os._exit(0)  # closing a group may wait for the rank that has gone


def waits_in_a_call_of_its_own() -> None:
    """The ranks wait for each other, rank 1 from half a second later on, and leave when they know.

    Rank 0 looks first, half a second before rank 1 does.
    """
    _outcomes.MISMATCH_CHECK_AFTER = 0.3
    time.sleep(RANK / 2)
    report(on_rank(1 - RANK)(int))
    os._exit(0)


def interrupted(worker: str) -> None:
    """Ctrl-C comes to all, from outside, and nobody catches it."""
    if int(worker) != RANK:
        Path(f"waits{RANK}").touch()
    on_rank(int(worker))(lambda: [Path(f"waits{RANK}").touch(), time.sleep(60)])()


class SlowToGo:
    """It makes the interpreter's own end last for seconds."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(4)


def gives_up(worker: str) -> None:
    """max_wait ends the wait, nobody catches it, and the work ends while the interpreter goes."""
    globals()["held"] = SlowToGo()
    body = lambda: time.sleep(1.5)  # noqa: E731
    call = on_rank(int(worker), max_wait=timedelta(seconds=0.5))(body)
    report(call) if int(worker) == RANK else call()


def slow(how: str, worker: str) -> None:
    """Work that is longer than the group's timeout, which may hold the interpreter lock."""
    sleep = {"sleeps": time.sleep, "holds the lock": ctypes.PyDLL(None).sleep}[how]  # type: ignore
    report(on_rank(int(worker), broadcast=True)(lambda: sleep(8) or how))
    report(usable)


def stopped(worker: str) -> None:
    """A stopped rank is given up after max_wait, waited for without, and ends a collective."""
    short = on_rank(int(worker), broadcast=True, max_wait=timedelta(seconds=1))
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
    """Wait until every rank has imported torch: the timeout is shorter than that may take."""
    Path(f"here{RANK}").touch()
    while not all(Path(f"here{rank}").exists() for rank in range(WORLD)):
        time.sleep(0.05)


if __name__ == "__main__":
    meet()
    initialize_ddp(TIMEOUT)
    globals()[sys.argv[1]](*sys.argv[2:])
    cleanup_ddp()  # else torch itself aborts now and then, when Python goes before gloo's threads
