"""How the memory of a job's processes grows while it trains."""

import subprocess
import time
from contextlib import suppress

import psutil
from harness import Running

SAMPLE = 5  # seconds between two looks at the memory
SETTLE = 60  # seconds in which a process may still grow: buffers, and code that is imported late


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
        """Take samples for `seconds`, or until the job ends; return whether it still runs."""
        end = time.monotonic() + seconds
        while self.running.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                self.sample()
            if (left := end - time.monotonic()) <= 0:
                return True
            with suppress(subprocess.TimeoutExpired):
                self.running.process.wait(min(left, SAMPLE))
        return False

    def sample(self) -> None:
        processes = [psutil.Process(self.running.process.pid), *ranks(self.running)]
        sizes = {process.pid: process.memory_full_info().uss / 2**20 for process in processes}
        if self.last in self.running.text():  # asked last: what follows training takes more
            return
        for pid, mib in sizes.items():
            name = self.names.setdefault(pid, f"rank {len(self.names) - 1}")
            self.samples.setdefault(name, []).append((time.monotonic(), mib))


def growth(samples: list[tuple[float, float]]) -> float | None:
    """Return the peak of the last minute less that of the first, None if there are not two."""
    settled, end = samples[0][0] + SETTLE, samples[-1][0]
    early = max(mib for when, mib in samples if when <= settled)
    late = [mib for when, mib in samples if when > max(settled, end - SETTLE)]
    return max(late) - early if late else None
