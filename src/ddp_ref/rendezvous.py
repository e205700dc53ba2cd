"""How the ranks meet: a store at the master, each rank's message in it, a deadline.

torch's own ways (env://, tcp://) overrun their timeout by half when the master is unreachable, hide
a wrong host name in a C++ trace, never say which rank is missing, and find the addresses of an
earlier group when the same processes meet again.
"""

from __future__ import annotations  # a torch built without distributed has no TCPStore

import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Event, Thread
from uuid import uuid4

import torch.distributed as dist

from .environment import LaunchInfo

RETRY, WARN_AFTER = 0.1, 10.0  # seconds between two tries to reach the master; until a warning
LONGEST_PAUSE = 0.25  # seconds between two looks whether all ranks are here
LATE = 0.5  # seconds past the deadline for the thread that knows what is wrong to say it

# One a master and process. Rank 0 serves it to others, who may meet again before rank 0 does.
_stores: dict[tuple[str, int], dist.TCPStore] = {}


def meet(launch: LaunchInfo, message: str, timeout: timedelta) -> tuple[dist.Store, list[str]]:
    """Wait for all ranks; return a store that is this meeting's own, and the ranks' messages.

    Collective: all ranks call. Raises RuntimeError, naming the master, where it cannot be reached
    or a rank does not come within `timeout`.
    """
    found: SimpleQueue[tuple[dist.Store, list[str]] | BaseException] = SimpleQueue()
    deadline = time.monotonic() + timeout.total_seconds()
    given_up, gone = Event(), Event()

    def look() -> None:
        try:
            found.put(_meet(launch, message, timeout, deadline, given_up))
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            found.put(error)
        finally:
            gone.set()

    # A store whose host is frozen keeps a call for ever, in C++, which feels no Ctrl-C either.
    try:
        Thread(target=look, daemon=True).start()
        while (left := deadline + LATE - time.monotonic()) > 0:
            with suppress(Empty):
                result = found.get(timeout=min(left, 0.2))
                if isinstance(result, BaseException):
                    raise result
                return result
    finally:  # a thread that comes back from C++ while Python ends aborts the process
        given_up.set()
        gone.wait(LATE)
    raise RuntimeError(f"{_here(launch)}: who is there gave no answer within {timeout}")


def _meet(
    launch: LaunchInfo, message: str, timeout: timedelta, deadline: float, given_up: Event
) -> tuple[dist.Store, list[str]]:
    if launch.master_addr is None or launch.master_port is None:
        raise ValueError(f"no master to meet at: {launch.reason}")
    master = (launch.master_addr, launch.master_port)
    here = _here(launch)
    try:
        if master not in _stores:
            _stores[master] = _connect(master, launch, here, deadline)
        shared = dist.PrefixStore("ddp_ref", _stores[master])
        talk = (_host if launch.rank == 0 else _join)(shared, launch, message)
        pause = 0.001
        while not shared.check([f"go/{(meeting := next(talk))}"]):
            if time.monotonic() > deadline or given_up.is_set():
                absent = ", ".join(map(str, _absent(shared, meeting, launch.world_size)))
                raise RuntimeError(f"{here}: within {timeout} there came no rank {absent}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        store = dist.PrefixStore(meeting, shared)
        store.set_timeout(timeout)
        return store, json.loads(shared.get(f"go/{meeting}"))
    except dist.DistError as error:
        raise RuntimeError(f"{here}: lost the store, which rank 0 serves: {error}") from error


def _here(launch: LaunchInfo) -> str:
    master = f"{launch.master_addr}:{launch.master_port}"
    return f"rank {launch.rank} of {launch.world_size}, master at {master}"


# A store may outlive a restart by torchrun, whose agents do not agree on how many there were. So
# nothing is read under a name that an earlier process could have used: a rank is welcomed under an
# id that it has just made, to a meeting with the id that rank 0 has just made.


def _host(store: dist.Store, launch: LaunchInfo, message: str) -> Iterator[str]:
    """Welcome all others, as rank 0; yield the meeting, again and again, until all have come."""
    meeting, welcomed = uuid4().hex, dict.fromkeys(range(1, launch.world_size), b"")
    messages = {0: message}
    while True:
        for rank in welcomed.keys() - messages.keys():
            if store.check([f"ack/{meeting}/{rank}"]):
                messages[rank] = store.get(f"ack/{meeting}/{rank}").decode()
            elif store.check([f"hello/{rank}"]):
                guest = store.get(f"hello/{rank}")
                if guest != welcomed[rank]:
                    store.set(f"welcome/{guest.decode()}", meeting)
                    welcomed[rank] = guest
        if len(messages) == launch.world_size:
            store.set(f"go/{meeting}", json.dumps([messages[rank] for rank in sorted(messages)]))
        yield meeting


def _join(store: dist.Store, launch: LaunchInfo, message: str) -> Iterator[str]:
    """Come to the meeting of rank 0; yield it, again and again, "" before the welcome."""
    guest, meeting = uuid4().hex, ""
    store.set(f"hello/{launch.rank}", guest)
    while True:
        if store.check([f"welcome/{guest}"]):
            invited = store.get(f"welcome/{guest}").decode()
            if invited != meeting:
                meeting = invited
                store.set(f"ack/{meeting}/{launch.rank}", message)
        yield meeting


def _absent(store: dist.Store, meeting: str, world_size: int) -> list[int]:
    """Return the ranks that have not come, as far as this rank can know."""
    if not meeting:
        return [0]
    return [rank for rank in range(1, world_size) if not store.check([f"ack/{meeting}/{rank}"])]


def forget(launch: LaunchInfo) -> None:
    """Close this process's side of the store, after a failure."""
    _stores.pop((launch.master_addr, launch.master_port), None)  # type: ignore[arg-type]


def serves(launch: LaunchInfo) -> bool:
    """Say whether this process hosts the store: rank 0 does, unless torchrun's agent has one."""
    environ = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    there = agent and environ == (launch.master_addr, str(launch.master_port))
    return launch.rank == 0 and not there


def _connect(
    master: tuple[str, int], launch: LaunchInfo, here: str, deadline: float
) -> dist.TCPStore:
    serve = serves(launch)
    if not serve:
        _wait_until_reachable(master, here, deadline)
    try:
        return dist.TCPStore(
            *master,
            is_master=serve,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=max(deadline - time.monotonic(), 1)),
            use_libuv=sys.platform != "win32",  # torch's Windows builds have no libuv
        )
    except dist.DistError as error:
        way_out = "; set MASTER_PORT to a free port" if serve else ""
        raise RuntimeError(
            f"{here}: no store to {'serve' if serve else 'join'}{way_out}: {error}"
        ) from error


def _wait_until_reachable(master: tuple[str, int], here: str, deadline: float) -> None:
    warn_at = time.monotonic() + WARN_AFTER
    while True:
        try:
            socket.create_connection(master, max(deadline - time.monotonic(), RETRY)).close()
            return
        except OSError as error:
            problem = f"{here}: cannot reach the master: {error}"
            now = time.monotonic()
            if now + RETRY > deadline:
                raise RuntimeError(problem) from error
            if now > warn_at:
                warnings.warn(f"{problem}; still trying", stacklevel=2)
                warn_at = deadline
        time.sleep(RETRY)
