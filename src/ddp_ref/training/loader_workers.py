"""A DataLoader whose worker processes leave signals to their rank, and exit with it."""

import ctypes
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize, is_exiting
from threading import current_thread, main_thread
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Loader(DataLoader[Any]):
    """A DataLoader that draws nothing from the global generator; `seed` seeds its workers."""

    def __init__(self, dataset: Dataset[Any], seed: int, **options: Any) -> None:
        self.has_own_generator = options.get("generator") is not None
        if not self.has_own_generator:
            options["generator"] = torch.Generator().manual_seed(seed)
        super().__init__(dataset, **options)

    def _get_iterator(self) -> Any:
        user_init_fn, from_main = self.worker_init_fn, current_thread() is main_thread()
        self.worker_init_fn = partial(
            _start, user_init_fn, from_main
        )  # for the workers that start now
        batches: Any = super()._get_iterator()
        self.worker_init_fn = user_init_fn
        if self.num_workers:
            # Holding the queues keeps them open while an iterator in a reference cycle is freed.
            # Else torch could not tell its workers to leave.
            workers_and_queues = batches._workers, batches._index_queues
            Finalize(batches, _kill_at_exit, workers_and_queues, exitpriority=0)
        return batches


def _start(user_init_fn: Callable[[int], None] | None, from_main: bool, worker_id: int) -> None:
    """Ignore SIGTERM and SIGUSR1, exit when the rank exits, and call the user's worker_init_fn."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # A forked worker keeps the rank's sockets open, so until it exits, no peer notices that the
    # rank died. torch checks for the parent only every 5 seconds. The signal comes when the thread
    # that forked the worker ends, so it is right only if that was the main thread.
    if sys.platform == "linux" and from_main:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if user_init_fn:
        user_init_fn(worker_id)


def _kill_at_exit(workers: Sequence[BaseProcess], _queues: object = None) -> None:
    """Kill the workers that are left at exit, where multiprocessing joins them without a timeout.

    They ignore SIGTERM. When an iterator is freed before, torch asks its workers to leave. A busy
    one leaves after its item, or at exit.
    """
    left = [worker for worker in workers if worker.is_alive()]
    if is_exiting():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch still watches them, and would raise
        for worker in left:
            worker.kill()
    elif left:
        Finalize(None, _kill_at_exit, (left,), exitpriority=0)
