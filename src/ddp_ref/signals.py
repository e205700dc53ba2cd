"""Signals as flags: a rank acts on them between two steps, and its loader's workers ignore them."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

EXIT_CODE = 143  # of a process that SIGTERM ended
NAMES = ("SIGTERM", "SIGUSR1", "SIGHUP")  # Windows has only the first
NUMBERS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
PR_SET_PDEATHSIG = 1  # linux/prctl.h
WORKER = "ddp_ref's loader worker"  # the name of its process
_hooked: set[int] = set()  # processes that kill their workers at exit: a fork needs its own hook


class Signalled(SystemExit):
    """A signal has reached some rank. All ranks raise this at the same step."""


@contextmanager
def caught_signals(into: list[int]) -> Iterator[None]:
    """Inside the block, SIGTERM, SIGUSR1 and SIGHUP only append to `into`.

    A collective in a signal handler would deadlock. If the block exits the process, the signals are
    ignored from then on: launchers repeat SIGTERM, and the repeat must not cut the exit short. A
    signal that came too late for the block to act on is raised again after the block, unless the
    block raised an exception, whose traceback it would cut short. Only handlers written in Python
    are restored, not those in C, such as faulthandler's. In other threads than the main one, this
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in NUMBERS if not _is_nohup(n)]
    after = {n: signal.signal(n, lambda number, _: into.append(number)) for n in numbers}
    try:
        yield
    except SystemExit:
        # SIG_IGN, not a handler of ours: Python removes its own handlers before it has exited.
        after = dict.fromkeys(numbers, signal.SIG_IGN)
        raise
    finally:
        for number, handler in after.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: C code set it
    for number in into:
        signal.raise_signal(number)


def _is_nohup(number: int) -> bool:
    """Say whether nohup lets this process survive a closed terminal."""
    return number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) is signal.SIG_IGN


def start_worker(
    user_init_fn: Callable[[int], None] | None, from_main: bool, worker_id: int
) -> None:
    """Ignore the signals, exit when the rank exits, and call the user's worker_init_fn."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    # A forked worker keeps the rank's sockets open, so until it exits, no peer notices that the
    # rank died. torch checks for the parent only every 5 seconds. The signal comes when the thread
    # that forked the worker ends, so it is right only if that was the main thread.
    if sys.platform == "linux" and from_main:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if user_init_fn:
        user_init_fn(worker_id)


def kill_at_exit(workers: list[BaseProcess]) -> None:
    """Let multiprocessing kill these workers at exit, where it would join them without a timeout.

    They ignore SIGTERM, and a busy one may not leave when torch asks it to.
    """
    if os.getpid() not in _hooked:
        _hooked.add(os.getpid())
        Finalize(None, _kill_workers, exitpriority=0)
    for worker in workers:
        worker.name = WORKER


def _kill_workers() -> None:
    if left := [child for child in multiprocessing.active_children() if child.name == WORKER]:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch still watches them, and would raise
        for worker in left:
            worker.kill()
