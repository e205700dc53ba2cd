"""Inject a fault: send a signal, fill a disk, or damage a file."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
from harness import Running
from judge import check_equal
from launchers import slurm, slurm_host
from moment import INJECTED, REACHED, TIMEOUT, put
from plan import EPOCHS, STEPS, Plan

from ddp_ref import checkpoint

SIGNALS = {
    "kill": signal.SIGKILL,
    "truncate": signal.SIGKILL,
    "flip": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
}
CHECKPOINT_SIZE = 110_000  # bytes, about
FILLER = "filler"  # the file that fills the disk
LAST = checkpoint.NAME.format(EPOCHS * STEPS)  # the training writes this checkpoint at its end
JOB_GONE = psutil.NoSuchProcess, ProcessLookupError, subprocess.CalledProcessError  # by scancel


def inject(plan: Plan, running: Running, folder: Path, checkpoints: Path) -> bool:
    """Inject the fault of `plan` and let the waiting rank continue.

    Returns:
        Whether the fault hit the training. If it has a delay, the training may have ended before.
    """
    rank = psutil.Process(int((folder / REACHED).read_text()))
    if plan.fault == "full disk":
        disk = os.statvfs(checkpoints)
        size = disk.f_bavail * disk.f_frsize - int(plan.share * CHECKPOINT_SIZE)
        (checkpoints / FILLER).write_bytes(bytes(max(0, size)))
    if plan.fault not in SIGNALS:
        error = f"the drill's own on rank {plan.rank}" if plan.fault == "exception" else ""
        put(folder / INJECTED, error)
        return True
    if plan.delay:
        put(folder / INJECTED, "")
        time.sleep(plan.delay)
    over = (checkpoints / LAST).exists()  # then the rank, or the whole job, may be gone
    with suppress(*JOB_GONE) if over else nullcontext():
        send(SIGNALS[plan.fault], plan, running, rank)
        over = over or (checkpoints / LAST).exists()  # written just before the signal
        if plan.fault == "pause":
            time.sleep(plan.share * TIMEOUT / 3)
            rank.send_signal(signal.SIGCONT)
    put(folder / INJECTED, "")
    return not over


def send(number: signal.Signals, plan: Plan, running: Running, rank: psutil.Process) -> None:
    """Send a signal to the rank, or to all: Ctrl-C as a terminal does, SIGTERM as schedulers do."""
    if not plan.to_all:
        rank.send_signal(number)
    elif number == signal.SIGINT:
        os.killpg(running.process.pid, number)
    elif plan.launcher == "srun":
        slurm("scancel", f"--signal={number}", rank.environ()["SLURM_JOB_ID"])
    else:
        running.process.send_signal(number)


def damage(plan: Plan, path: Path) -> bool:
    """Truncate the file or flip one of its bits, and return whether that can be noticed.

    Some bits have no meaning. If one of them is flipped, the weights must be unchanged.
    """
    weights = checkpoint.read(path)["model"]
    content = bytearray(path.read_bytes())
    place = int(plan.share * len(content))
    if plan.fault == "truncate":
        del content[place:]
    else:
        content[place] ^= 1 << plan.nth % 8
    path.write_bytes(content)
    try:
        damaged = checkpoint.read(path)["model"]
    except checkpoint.DamagedCheckpoint:
        return True
    check_equal(damaged, weights, "a damaged checkpoint that can be read")
    return False


@contextmanager
def small_disk(launcher: str, folder: Path) -> Iterator[Path]:
    """Mount a small tmpfs at `folder` where rank 0 runs, and yield a path to it for this process.

    Raise OSError if that is impossible here. The hosts of the local Slurm cluster have mounts of
    their own, which /proc makes accessible.
    """
    host = slurm_host() if launcher == "srun" else os.getpid()
    on_host = ["nsenter", f"--target={host}", "--mount"]
    folder.mkdir(exist_ok=True)
    mount(*on_host, "mount", "-t", "tmpfs", "-o", "size=2m", "drill", str(folder))
    try:
        yield Path(f"/proc/{host}/root{folder}")
    finally:
        mount(*on_host, "umount", "--lazy", str(folder))  # lazy: a process may still use it


def mount(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if ended.returncode:
        raise OSError(f"cannot mount a small disk: {ended.stderr.strip()}")
