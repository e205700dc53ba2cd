"""One rank of a run with a fault. test_faults.py starts it: `fault_ranks.py SCENARIO ...`.

Each rank writes its results and exceptions to rank<R>.json, each with the time.
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
from harness import wait_until

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
    """Append the result of the call, or its exception with the notes, to this rank's file."""
    try:
        seen = {"type": None, "text": repr(call())}
    except BaseException as error:  # noqa: BLE001 - reported
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        seen = {"type": type(error).__name__, "text": text}
    file = Path(f"rank{RANK}.json")
    before = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*before, seen | {"at": time.time()}]))


def dies(how: str, worker: str) -> None:
    """The executing rank dies, or gets a SIGINT, in the body."""
    report(on_rank(int(worker))(lambda: die(how)))


def dies_among_workers(how: str, worker: str) -> None:
    """One of two executing ranks dies. The other works until the third has reported the death."""
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
    """A waiting rank dies or gets a SIGINT, a second before the work ends."""
    if (int(worker) + 1) % WORLD == RANK:
        threading.Thread(target=die, args=(how,), daemon=True).start()
    report(on_rank(int(worker))(lambda: [wait_until(Path("fault_at").exists), time.sleep(1)]))


def dies_between_calls(dying: str) -> None:
    """A rank exits after the first call, and then the others make a second one."""
    on_rank(0)(int)()
    if int(dying) == RANK:
        die("exit")
    time.sleep(1.5)  # by then, the rank is gone
    report(on_rank(0, max_wait=timedelta(seconds=4))(int))
    os._exit(0)  # closing the group may wait for the rank that is gone


def waits_in_a_call_of_its_own() -> None:
    """Each rank waits for the other one, in a call that the other rank does not make.

    Rank 0 starts half a second before rank 1, so it is also the first to look for a mismatch. Each
    rank exits as soon as it has reported the mismatch.
    """
    _outcomes.MISMATCH_CHECK_AFTER = 0.3
    time.sleep(RANK / 2)
    report(on_rank(1 - RANK)(int))
    os._exit(0)


def interrupted(worker: str) -> None:
    """The test sends Ctrl-C to all ranks, and none of them catches it."""
    if int(worker) != RANK:
        Path(f"waits{RANK}").touch()
    on_rank(int(worker))(lambda: [Path(f"waits{RANK}").touch(), time.sleep(60)])()


class SlowToGo:
    """Creates a file when the interpreter shuts down, which then takes four more seconds."""

    def __init__(self) -> None:
        self.touch, self.sleep = Path(f"going{RANK}").touch, time.sleep

    def __del__(self) -> None:
        self.touch()
        self.sleep(4)


def interrupted_at_once(worker: str) -> None:
    """Ctrl-C reaches one rank just as it has started the thread that waits for the others.

    The others end while that rank's interpreter is shutting down.
    """
    start = threading.Thread.start

    def start_and_raise(thread: threading.Thread) -> None:
        threading.Thread.start = start  # type: ignore[method-assign]
        thread.start()
        raise KeyboardInterrupt

    if int(worker) == RANK:
        globals()["held"] = SlowToGo()
        threading.Thread.start = start_and_raise  # type: ignore[method-assign]
        on_rank(int(worker))(int)()
    time.sleep(3)
    os._exit(0)


def gives_up(worker: str) -> None:
    """The waiting ranks give up after `max_wait` and do not catch the exception.

    The work ends while their interpreters are shutting down.
    """
    globals()["held"] = SlowToGo()
    going = [Path(f"going{rank}") for rank in range(WORLD) if rank != int(worker)]
    body = lambda: wait_until(lambda: all(path.exists() for path in going))  # noqa: E731
    limit = timedelta(seconds=30 if int(worker) == RANK else 0.5)
    call = on_rank(int(worker), max_wait=limit)(body)
    report(call) if int(worker) == RANK else call()


def slow(how: str, worker: str) -> None:
    """The work takes longer than the group's timeout. It may hold the GIL all that time."""
    sleep = {"sleeps": time.sleep, "holds the lock": ctypes.PyDLL(None).sleep}[how]  # type: ignore
    report(on_rank(int(worker), broadcast=True)(lambda: sleep(8) or how))
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
