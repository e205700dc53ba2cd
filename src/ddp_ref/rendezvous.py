"""Bring all ranks together at one store before a deadline, or name the ranks that are missing.

torch can open a group by itself (env://, tcp://), but then it overruns its timeout by half if the
master cannot be reached, hides a wrong host name in a C++ trace, and never says which rank is
missing.
"""

from __future__ import annotations  # a torch that was built without distributed has no TCPStore

import json
import os
import socket
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any, TypeVar

import torch.distributed as dist

from .environment import LaunchInfo
from .slurm import read_int

T = TypeVar("T")
# Seconds past the deadline, for a step that knows the cause; to find out which ranks are missing;
# and at the end, for other ranks and threads.
GRACE = 0.5
RETRY, WARN_AFTER = 0.1, 10.0  # seconds: between attempts to connect; until a warning says so

# The store at each master. It outlives its group, because another rank may call initialize_ddp
# again before the rank that hosts the store does. A forked child needs a connection of its own.
_stores: dict[Any, dist.TCPStore] = {}


def start_thread(function: Callable[..., object], *args: object) -> Thread:
    """Call `function` in a thread that this process does not wait for when it exits."""
    thread = Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


class RendezvousError(RuntimeError):
    """The ranks could not open the process group together."""


class Rendezvous:
    """One attempt to open a process group: its store, its master and its deadline.

    Args:
        launch: Who this process is, and where the master is.
        timeout: How long the whole opening may take.
    """

    def __init__(self, launch: LaunchInfo, timeout: timedelta) -> None:
        self.launch, self.timeout = launch, timeout
        self.store: Any = None  # a dist.Store of this opening, once we are connected
        self._master: tuple[Any, Any] = (launch.master_addr, launch.master_port)
        self._key = (*self._master, os.getpid())
        self._deadline = time.monotonic() + timeout.total_seconds()
        self.given_up = Event()

    def run(self, stage: str, step: Callable[[], T]) -> T:
        """Run one step of the opening and return its result, or raise when the time is up.

        A frozen peer can keep many C++ calls waiting for longer than any timeout, and none of them
        notices Ctrl-C. So the step has a thread of its own, and the main thread has the deadline.

        Args:
            stage: What every rank does in this step. It completes "rank 1 did not ..." in errors.
            step: The function to run. It must call `exchange` before it returns.
        """
        self._stage = self._reports = stage
        result: Future[T] = Future()

        def attempt(result: Future[T]) -> None:
            try:
                result.set_result(step())
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                result.set_exception(error)
            del result  # otherwise frame, exception and traceback form a cycle that holds the store

        try:
            thread = start_thread(attempt, result)
            while thread.is_alive() and time.monotonic() < self._deadline + GRACE:
                thread.join(0.2)
            if not result.done():
                raise self._late(self._find_missing())
            return result.result()
        except RendezvousError:
            raise
        except RuntimeError as error:
            if self._reports == stage and time.monotonic() < self._deadline:
                raise self._failure(f"could not {stage}: {error}") from error
            # A timeout of torch's own, or a rank that died after its report. torch does not say
            # which rank is the cause, and the others may still be reading the store.
            time.sleep(GRACE)
            raise self._late(self._find_missing()) from error
        finally:
            del result

    def give_up(self) -> None:
        """Disconnect, and make a step that is still running destroy any group that it opens."""
        self.given_up.set()
        if not hosts_store(self.launch):
            _stores.pop(self._key, None)

    def exchange(self, report: object) -> list[Any]:
        """Return what every rank reports at this stage, in rank order, once all have reached it.

        Rank 0 says so once it has seen all ranks, unless another rank has named missing ones first.
        """
        self.store = self.store or self._connect()
        keys = [f"{self._stage}/{rank}" for rank in range(self.launch.world_size)]
        self.store.set(keys[self.launch.rank], json.dumps(report))
        if self.launch.rank == 0:
            reports = list(map(json.loads, self._wait_for(keys)))
            # All reports are in one value: with N keys to read, N ranks would read N² of them.
            self.store.compare_set(self._stage, "", json.dumps([[], reports]))
        missing, reports = json.loads(self._wait_for([self._stage])[0])
        if missing:
            raise self._late(missing)
        # From here on, a rank is missing until it has read the decision, too.
        self._reports = f"{self._stage}, all seen"
        self.store.set(f"{self._reports}/{self.launch.rank}", "")
        return list(reports)

    def _wait_for(self, keys: list[str]) -> Any:
        """Return the values of `keys`, as bytes, once all of them are in the store.

        Raises:
            RendezvousError: If the main thread has given up.
        """
        pause = 0.001
        while self.given_up.is_set() or not self.store.check(keys):
            if self.given_up.wait(pause):  # so this rank must not report success
                raise RendezvousError("the main thread has raised")
            pause = min(2 * pause, 0.25)
        return self.store.multi_get(keys)

    def _find_missing(self) -> list[int] | None:
        """Return the other ranks that are not as far as this one, and name them to all ranks.

        The step may be using the store, so this takes a connection of its own. It also takes a
        thread, because the frozen rank may be the one that hosts the store. None if the store does
        not answer.
        """
        answer: list[list[int]] = []

        def ask() -> None:
            with suppress(AttributeError, dist.DistError):  # no store yet, or no answer from it
                self.store.set_timeout(timedelta(seconds=GRACE))
                store = self.store.clone()
                others = sorted(set(range(self.launch.world_size)) - {self.launch.rank})
                missing = [rank for rank in others if not store.check([f"{self._reports}/{rank}"])]
                if missing:
                    store.set(self._stage, json.dumps([missing, []]))
                answer.append(missing)

        start_thread(ask).join(GRACE)
        return answer[0] if answer else None

    def _late(self, missing: list[int] | None) -> RendezvousError:
        problem = "all ranks reported, then one stopped answering"
        advice = "look at the other ranks' output"
        if missing is None:
            problem = "the master does not answer"
            advice = "check that rank 0, which hosts the store, runs, and that MASTER_PORT is free"
        elif missing:
            problem = f"rank {', '.join(map(str, missing))} did not {self._stage}"
            advice = "look at its output; it must be running, in time and able to reach rank 0"
        return self._failure(f"{problem} (timeout {self.timeout}): {advice}")

    def _failure(self, problem: str) -> RendezvousError:
        host, port = self._master
        who = f"rank {self.launch.rank} of {self.launch.world_size}, master at {host}:{port}"
        return RendezvousError(f"{who}: {problem}".splitlines()[0])  # torch adds its C++ trace

    def _connect(self) -> dist.PrefixStore:
        """Return a store whose key prefix is new, so keys of earlier attempts cannot be seen."""
        if self._key not in _stores:
            _stores[self._key] = self._open_store()
        # torchrun's agent keeps its store when it restarts the ranks, so number the attempts too.
        kept = _agent_has_store(self.launch)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"
        # torchrun does not count a change of size as a restart, so add the size.
        store = dist.PrefixStore(f"ddp_ref/{attempt}/{self.launch.world_size}", _stores[self._key])
        opening = store.add(f"openings of rank {self.launch.rank}", 1)
        store = dist.PrefixStore(str(opening), store)
        store.set_timeout(self.timeout)
        return store

    def _open_store(self) -> dist.TCPStore:
        if not hosts_store(self.launch):
            self._reach_master()
        try:
            return dist.TCPStore(
                *self._master,
                is_master=hosts_store(self.launch),
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=max(self._deadline - time.monotonic(), 1)),
            )
        except dist.DistError as error:
            raise self._failure(f"cannot open the store (MASTER_PORT in use?): {error}") from error

    def _reach_master(self) -> None:
        """Wait until the master accepts connections: torch hides a wrong name in a C++ trace."""
        warn_at = time.monotonic() + WARN_AFTER
        while True:
            left = self._deadline - time.monotonic()
            try:
                return socket.create_connection(self._master, max(left, RETRY)).close()
            except (OSError, UnicodeError) as error:  # UnicodeError: a name such as a..b
                problem = self._failure(f"cannot reach the master: {error}; check MASTER_ADDR")
                if left < RETRY or self.given_up.wait(RETRY):
                    raise problem from error
            if time.monotonic() > warn_at:
                warnings.warn(f"{problem}; still trying", stacklevel=2)
                warn_at = self._deadline


def hosts_store(launch: LaunchInfo) -> bool:
    """Return whether this process hosts the store: rank 0 does, unless torchrun's agent has one."""
    return launch.rank == 0 and not _agent_has_store(launch)


def refuse_unsafe_restarts(launch: LaunchInfo) -> None:
    """Raise if a restart by torchrun could read the addresses of dead ranks (pytorch#135712).

    On one node we number the attempts in the store. On several nodes, the agents may count their
    attempts differently.

    Raises:
        ValueError: If TORCHELASTIC_MAX_RESTARTS is not an integer.
        RuntimeError: If restarts are on, the store is shared, and there are several nodes.
    """
    restarts = read_int(os.environ, "TORCHELASTIC_MAX_RESTARTS", 0)
    if restarts and _agent_has_store(launch) and launch.nnodes > 1:
        raise RuntimeError(
            f"--max-restarts={restarts} on several nodes needs a store per attempt (pytorch issue "
            "135712): set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun and use "
            "--rdzv-backend=c10d. Static rendezvous (--master-addr) cannot restart"
        )


def _agent_has_store(launch: LaunchInfo) -> bool:
    """Return whether torchrun's agent hosts the store at this launch's master, across restarts."""
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and master == (launch.master_addr, str(launch.master_port))
