"""Start char_gpt.py once, let a fault end it, watch its memory, and check what is left."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import psutil
from harness import SCRIPTS, Result, Running, torchrun
from judge import Wrong, check_kept, check_no_crash, intact_checkpoints
from launchers import CHECKPOINTS

from ddp_ref import checkpoint

LAUNCHERS = "torchrun", "--nproc"
DEADLINE = 120  # seconds for a start, and for an end after a fault
STUCK = 180  # seconds without a new checkpoint: an epoch took 5 to 12 s, and 33 s on a busy machine
FAULTS = "SIGKILL to a rank", "SIGKILL to all ranks", "SIGTERM to the launcher", "Ctrl-C"
SETTLE = 60  # seconds in which a process may still allocate buffers and import modules
WINDOW = 30  # seconds: we compare medians of the memory over such a window

Samples = list[tuple[float, float]]  # seconds and MiB


@dataclass
class Attempt:
    """One start of the job, and how it went until the job ended or a fault ended it."""

    launcher: str
    start: str  # the newest checkpoint at the start, "" if there was none
    code: int = 0
    fault: str = ""  # that ended it
    peak: float = 0  # MiB, of the largest process
    growths: dict[str, float] = field(default_factory=dict)  # MiB, of processes that ran for long

    def __str__(self) -> str:
        begin = f"{self.launcher} | from {self.start or 'scratch'}"
        return f"{begin} | {self.fault or 'no fault'} | exit code {self.code}"


def ranks(running: Running) -> list[psutil.Process]:
    """Return the processes of the ranks, which the launcher has started."""
    children = psutil.Process(running.process.pid).children()
    return [child for child in children if "resource_tracker" not in "".join(child.cmdline())]


class Memory:
    """Each process's own memory (USS), sampled until the job writes one of `ends`."""

    def __init__(self, running: Running, ends: Sequence[str]) -> None:
        self.running, self.ends = running, ends
        self.names = {running.process.pid: "launcher"}
        self.samples: dict[str, Samples] = {}

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

    def peak(self) -> float:
        return max((mib for samples in self.samples.values() for _, mib in samples), default=0)

    def growths(self) -> dict[str, float]:
        """Return the growth of each process that has run for long enough."""
        growths = {name: growth(samples) for name, samples in self.samples.items()}
        return {name: mib for name, mib in growths.items() if mib is not None}


def growth(samples: Samples) -> float | None:
    """Return by how many MiB the last half minute is above the first one after SETTLE.

    Both are medians, so a short peak does not count. None if there are too few samples.
    """
    settled, end = samples[0][0] + SETTLE, samples[-1][0]
    early = [mib for when, mib in samples if settled <= when < settled + WINDOW]
    late = [mib for when, mib in samples if settled + WINDOW <= end - WINDOW < when]
    return median(late) - median(early) if early and late else None


def run_once(args: argparse.Namespace, folder: Path, number: int, every: float) -> Attempt:
    """Start the job, let faults happen about every `every` seconds, and return how it went."""
    home = folder / CHECKPOINTS
    job: list[str | Path] = [SCRIPTS / "char_gpt.py", "--epochs", str(args.epochs)]
    job += ["--run-dir", CHECKPOINTS, *args.flags]
    command = [sys.executable, *job, "--nproc", "2"] if number % 2 else torchrun(2, *job)
    attempt = Attempt(LAUNCHERS[number % 2], max(intact_checkpoints(home), default=""))
    # With a fault handler, a segmentation fault is seen in the output.
    with Running(*command, cwd=folder, env={"PYTHONFAULTHANDLER": "1"}) as running:
        running.wait_for("epochs are done", DEADLINE)
        check_start(attempt.start, running.text())
        ends = [f"epoch {args.epochs} |", f"{args.epochs} of {args.epochs} epochs"]
        memory, chance = Memory(running, ends), Random(f"{args.seed} {number}")
        fault, before = disturb(memory, home, chance, every)
        injected = time.monotonic()
        running.wait(DEADLINE)
        while running.processes() and time.monotonic() < injected + DEADLINE:
            time.sleep(0.1)  # with --nproc, ranks may live on for seconds after their parent
        result = running.wait()  # again, because the last ranks may have written more
    # Leaving the `with` block has checked that no process is left.
    attempt.code, attempt.fault = result.code, fault if result.code else ""
    attempt.peak, attempt.growths = memory.peak(), memory.growths()
    check_end(result, fault, before, home)
    return attempt


def check_start(start: str, log: str) -> None:
    """Raise Wrong unless the job says in its log that it began with the checkpoint `start`."""
    begins = re.findall(r"(?:loaded|no checkpoint in) (\S+):", log)
    if not begins or Path(begins[-1]) != Path(CHECKPOINTS, start):
        raise Wrong(f"the job did not begin with {start or 'no checkpoint'}\n{log}")


def disturb(memory: Memory, home: Path, chance: Random, every: float) -> tuple[str, set[str]]:
    """Let the job train, then inject a fault.

    Returns:
        The fault, and the checkpoints before it. The fault is "" if the job ends by itself.
    """
    # The second wait lets the fault fall anywhere in an epoch. If the job ends, no fault did it.
    trains = train(memory, home, every * chance.uniform(0.5, 1.5))
    if not trains or not memory.watch(every * chance.uniform(0, 0.1)):
        return "", set()
    fault, before = chance.choice(FAULTS), intact_checkpoints(home)
    with suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError):  # it may have just ended
        inject(fault, memory.running, chance)
    return fault, before


def train(memory: Memory, home: Path, seconds: float) -> bool:
    """Let the job train for `seconds` and on to its next checkpoint; return whether it still runs.

    Waiting for that checkpoint means that the next fault cannot hide a hang.
    """
    newest = checkpoint.numbered(home)[-1:]
    begun = since = time.monotonic()
    while memory.watch(1):
        now, latest = time.monotonic(), checkpoint.numbered(home)[-1:]
        if latest != newest:
            if now > begun + seconds:
                return True
            newest, since = latest, now
        elif now > since + STUCK:
            raise Wrong(f"no new checkpoint for {STUCK} s\n{memory.running.text()}")
    return False


def inject(fault: str, running: Running, chance: Random) -> None:
    if fault == "SIGTERM to the launcher":
        running.process.terminate()
    elif fault == "Ctrl-C":
        os.killpg(running.process.pid, signal.SIGINT)
    elif fault == "SIGKILL to all ranks":
        for rank in ranks(running):
            rank.kill()
    else:
        chance.choice(ranks(running)).kill()


def check_end(ended: Result, fault: str, before: set[str], home: Path) -> None:
    """Raise Wrong if the end does not fit the fault, or a checkpoint is lost or damaged."""
    after = intact_checkpoints(home)
    check_no_crash(ended)
    check_kept(before, after)
    if damaged := {path.name for path in checkpoint.numbered(home)} - after:
        raise Wrong(f"damaged: {', '.join(sorted(damaged))}")
    if ended.code and not fault:
        raise Wrong(f"no fault, but exit code {ended.code}\n{ended.stderr}")
    # After the last checkpoint, a fault may come too late to change the exit code.
    if fault and not ended.code and max(after, default="") not in before:
        raise Wrong(f"the job ignored {fault}\n{ended.stderr}")
