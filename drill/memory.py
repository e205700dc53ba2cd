"""How the memory of a job's processes grows while it trains."""

import subprocess
import time
from contextlib import suppress
from statistics import median

import psutil
from harness import Running

SAMPLE = 1  # seconds between two looks at the memory
SETTLE = 60  # seconds in which a process may still grow: buffers, and code that is imported late
WINDOW = 30  # seconds of training, whose median counts


def ranks(running: Running) -> list[psutil.Process]:
    children = psutil.Process(running.process.pid).children()
    return [child for child in children if "resource_tracker" not in "".join(child.cmdline())]


class Memory:
    """The memory that each process has for itself (USS), sampled until the job writes `last`."""

    def __init__(self, running: Running, last: str) -> None:
        self.running, self.last = running, last
        self.names = {running.process.pid: "launcher"}
        self.samples: dict[str, list[tuple[float, float]]] = {}  # seconds and MiB

    def watch(self, seconds: float) -> bool:
        """Take a sample, wait for `seconds` or until the job ends; return whether it still runs."""
        with suppress(psutil.NoSuchProcess):
            self.sample()
        with suppress(subprocess.TimeoutExpired):
            self.running.process.wait(seconds)
        return self.running.process.poll() is None

    def sample(self) -> None:
        processes = [psutil.Process(self.running.process.pid), *ranks(self.running)]
        sizes = {process.pid: process.memory_full_info().uss / 2**20 for process in processes}
        if self.last in self.running.text():  # asked last: what follows training takes more
            return
        for pid, mib in sizes.items():
            name = self.names.setdefault(pid, f"rank {len(self.names) - 1}")
            self.samples.setdefault(name, []).append((time.monotonic(), mib))


def growth(samples: list[tuple[float, float]]) -> float | None:
    """Return how much more it is at the end than after a minute, None if it was too short.

    A peak does not count, because both are the median of half a minute.
    """
    settled, end = samples[0][0] + SETTLE, samples[-1][0]
    early = [mib for when, mib in samples if settled <= when < settled + WINDOW]
    late = [mib for when, mib in samples if settled + WINDOW <= end - WINDOW < when]
    return median(late) - median(early) if early and late else None
