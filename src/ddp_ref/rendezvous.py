"""How the ranks meet: a store at the master, each rank's message in it, a deadline.

torch's own ways (env://, tcp://) overrun their timeout by half when the master is unreachable, hide
a wrong host name in a C++ trace, never say which rank is missing, and find the addresses of an
earlier group when the same processes meet again.
"""

from __future__ import annotations  # a torch built without distributed has no TCPStore

import os
import socket
import sys
import time
import warnings
from datetime import timedelta

import torch.distributed as dist

from .environment import LaunchInfo

RETRY, WARN_AFTER = 0.1, 10.0  # seconds between two tries to reach the master; until a warning
LONGEST_PAUSE = 0.25  # seconds between two looks whether all ranks are here

# One a master and process. Rank 0 serves it to others, who may meet again before rank 0 does.
_stores: dict[tuple[str, int], dist.TCPStore] = {}


def meet(launch: LaunchInfo, message: str, timeout: timedelta) -> tuple[dist.Store, list[str]]:
    """Wait for all ranks; return a store that is this meeting's own, and the ranks' messages.

    Collective: all ranks call. Raises RuntimeError, naming the master, where it cannot be reached
    or a rank does not come within `timeout`.
    """
    if launch.master_addr is None or launch.master_port is None:
        raise ValueError(f"no master to meet at: {launch.reason}")
    master = (launch.master_addr, launch.master_port)
    here = f"rank {launch.rank} of {launch.world_size}, master at {master[0]}:{master[1]}"
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        if master not in _stores:
            _stores[master] = _connect(master, launch.rank, here, deadline)
        # Ranks that fail before they meet would count differently after torchrun restarts them.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        meeting = _stores[master].add(f"ddp_ref/{restart}/{launch.rank}", 1)
        store = dist.PrefixStore(f"ddp_ref/{restart}/{meeting}", _stores[master])
        store.set_timeout(timeout)
        names = [f"message/{rank}" for rank in range(launch.world_size)]
        store.set(names[launch.rank], message)
        store.add("here", 1)
        pause = 0.001
        while store.add("here", 0) < launch.world_size:
            if time.monotonic() > deadline:
                absent = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
                raise RuntimeError(
                    f"{here}: within {timeout} there came no rank {', '.join(absent)}"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return store, [text.decode() for text in store.multi_get(names)]
    except dist.DistError as error:
        raise RuntimeError(f"{here}: lost the store, which rank 0 serves: {error}") from error


def forget(launch: LaunchInfo) -> None:
    """Close this process's side of the store, after a failure."""
    _stores.pop((launch.master_addr, launch.master_port), None)  # type: ignore[arg-type]


def _connect(master: tuple[str, int], rank: int, here: str, deadline: float) -> dist.TCPStore:
    environ = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent serves it
    serve = rank == 0 and not (agent and environ == (master[0], str(master[1])))
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
