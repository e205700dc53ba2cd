"""Start char_gpt.py once, inject faults until one of them ends it, and check what is left."""

import argparse
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
from harness import SCRIPTS, Result, Running, torchrun
from judge import Wrong, check_kept, check_no_crash
from launchers import CHECKPOINTS
from memory import SAMPLE, Memory, growth, ranks
from rounds import intact_checkpoints

from ddp_ref.training import checkpoint

LAUNCHERS = "torchrun", "--nproc"
DEADLINE = 120  # seconds for a start, and for an end after a fault
STUCK = 180  # seconds without a new checkpoint: an epoch took 5 to 12 s, and 33 s on a busy machine
PAUSE = "pause of a rank"
FAULTS = ("SIGKILL to a rank", "SIGKILL to all ranks", "SIGTERM to the launcher", "Ctrl-C", PAUSE)


@dataclass
class Attempt:
    """One start of the job, and how it went until the job ended or a fault ended it."""

    launcher: str
    start: str  # the newest checkpoint at the start, "" if there was none
    code: int = 0
    training: float = 0  # seconds from the start until the training continued
    trained: float = 0  # seconds from then until the end, or until the fault that ended the job
    ended: float | None = None  # seconds from that fault until the end
    faults: list[str] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)  # MiB, of each process
    growths: dict[str, float | None] = field(default_factory=dict)  # None: it was too short

    def __str__(self) -> str:
        end = f"exit code {self.code}"
        end += "" if self.ended is None else f" after {self.ended:.1f} s"
        begin = f"{self.launcher} | from {self.start or 'scratch'} in {self.training:.1f} s"
        return f"{begin} | {self.trained:.0f} s | {', '.join(self.faults) or 'no fault'} | {end}"


def inject(fault: str, running: Running, chance: Random) -> None:
    if fault == "SIGTERM to the launcher":
        running.process.terminate()
    elif fault == "Ctrl-C":
        os.killpg(running.process.pid, signal.SIGINT)
    elif fault == "SIGKILL to all ranks":
        for rank in ranks(running):
            rank.kill()
    elif fault == "SIGKILL to a rank":
        chance.choice(ranks(running)).kill()
    else:
        rank = chance.choice(ranks(running))
        rank.suspend()
        time.sleep(chance.uniform(1, 5))
        rank.resume()


def run_once(args: argparse.Namespace, folder: Path, number: int, every: float) -> Attempt:
    """Start the job, let faults happen about every `every` seconds, and return how it went."""
    home = folder / CHECKPOINTS
    job: list[str | Path] = [SCRIPTS / "char_gpt.py", "--epochs", str(args.epochs)]
    job += ["--run-dir", CHECKPOINTS, *args.flags]
    command = [sys.executable, *job, "--nproc", "2"] if number % 2 else torchrun(2, *job)
    attempt = Attempt(LAUNCHERS[number % 2], max(intact_checkpoints(home), default=""))
    begun = time.monotonic()
    # With a fault handler, a segmentation fault is seen in the output.
    with Running(*command, cwd=folder, env={"PYTHONFAULTHANDLER": "1"}) as running:
        running.wait_for("epochs are done", DEADLINE)
        check_start(attempt.start, (home / "log.txt").read_text())
        training = time.monotonic()
        memory = Memory(
            running, [f"epoch {args.epochs} |", f"{args.epochs} of {args.epochs} epochs"]
        )
        chance = Random(f"{args.seed} {number}")
        fault, before = disturb(memory, attempt.faults, home, chance, every)
        injected = time.monotonic()
        running.wait(DEADLINE)
        while running.processes() and time.monotonic() < injected + DEADLINE:
            time.sleep(0.1)  # with --nproc, ranks may live on for seconds after their parent
        result = running.wait()  # again, because the last ranks may have written more
    # Leaving the `with` block has checked that no process is left.
    if fault and result.code:
        attempt.faults.append(fault)
        attempt.ended = time.monotonic() - injected
    attempt.code, attempt.training = result.code, training - begun
    attempt.trained = injected - training
    attempt.peaks = {name: max(mib for _, mib in own) for name, own in memory.samples.items()}
    attempt.growths = {name: growth(own) for name, own in memory.samples.items()}
    check_end(result, fault, before, home)
    return attempt


def disturb(
    memory: Memory, pauses: list[str], home: Path, chance: Random, every: float
) -> tuple[str, set[str]]:
    """Let the job train, and inject faults until one of them ends it.

    Returns:
        The last fault, and the checkpoints before it. The fault is "" if the job ends by itself.
        Pauses do not end the job, so they are appended to `pauses`.
    """
    while train(memory, home, every * chance.uniform(0.5, 1.5)):
        # So that a fault falls anywhere in an epoch. If the job ends meanwhile, no fault did it.
        if not memory.watch(every * chance.uniform(0, 0.1)):
            break
        fault, before = chance.choice(FAULTS), intact_checkpoints(home)
        # The job may have just ended.
        with suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError):
            inject(fault, memory.running, chance)
            if fault == PAUSE:
                pauses.append(fault)
        if fault != PAUSE:
            return fault, before
    return "", set()


def train(memory: Memory, home: Path, seconds: float) -> bool:
    """Let the job train for `seconds` and on to its next checkpoint; return whether it still runs.

    Waiting for that checkpoint means that the next fault cannot hide a hang.
    """
    newest = checkpoint.numbered(home)[-1:]
    begun = since = time.monotonic()
    while memory.watch(SAMPLE):
        now, latest = time.monotonic(), checkpoint.numbered(home)[-1:]
        if latest != newest:
            if now > begun + seconds:
                return True
            newest, since = latest, now
        elif now > since + STUCK:
            raise Wrong(f"no new checkpoint for {STUCK} s\n{memory.running.text()}")
    return False


def check_start(start: str, log: str) -> None:
    """Raise Wrong unless the job says in its log that it began with the checkpoint `start`."""
    begins = re.findall(r"(?:loaded|no checkpoint in) (\S+):", log)
    if not begins or Path(begins[-1]) != Path(CHECKPOINTS, start):
        raise Wrong(f"the job did not begin with {start or 'no checkpoint'}\n{log}")


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
