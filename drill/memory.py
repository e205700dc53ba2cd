"""How the memory of a job's processes grows while it trains."""

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median

import psutil
from harness import Running

SAMPLE = 1  # seconds between two samples
SETTLE = 60  # seconds in which a process may still allocate buffers and import modules
WINDOW = 30  # seconds: we compare medians over such a window


def ranks(running: Running) -> list[psutil.Process]:
    """Return the processes of the ranks, which the launcher has started."""
    children = psutil.Process(running.process.pid).children()
    return [child for child in children if "resource_tracker" not in "".join(child.cmdline())]


class Memory:
    """Each process's own memory (USS), sampled until the job writes one of `ends`."""

    def __init__(self, running: Running, ends: Sequence[str]) -> None:
        self.running, self.ends = running, ends
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
        # Checked after measuring, because the scoring after the training takes more memory.
        text = self.running.text()
        if any(end in text for end in self.ends):
            return
        for pid, mib in sizes.items():
            name = self.names.setdefault(pid, f"rank {len(self.names) - 1}")
            self.samples.setdefault(name, []).append((time.monotonic(), mib))


def growth(samples: list[tuple[float, float]]) -> float | None:
    """Return by how many MiB the last half minute is above the first one after SETTLE.

    Both are medians, so a short peak does not count. None if there are too few samples.
    """
    settled, end = samples[0][0] + SETTLE, samples[-1][0]
    early = [mib for when, mib in samples if settled <= when < settled + WINDOW]
    late = [mib for when, mib in samples if settled + WINDOW <= end - WINDOW < when]
    return median(late) - median(early) if early and late else None
