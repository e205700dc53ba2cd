"""The faults: signals to processes, a disk that gets full, a file that is damaged."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
from harness import Running, clean_environment
from launchers import TIMEOUT, host_process, slurm_environment
from moment import REACHED, STRUCK, put
from plan import EPOCHS, STEPS, Plan

from ddp_ref.training import checkpoint

SIGNALS = {
    "kill": signal.SIGKILL,
    "truncate": signal.SIGKILL,
    "flip": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
}
DISK = "2m"
CHECKPOINT = 110_000  # bytes, about
FILLER = "filler"
LAST = checkpoint.NAME.format(EPOCHS * STEPS)  # once this checkpoint is there, training is over
GONE = psutil.NoSuchProcess, ProcessLookupError, subprocess.CalledProcessError  # of scancel


def strike(plan: Plan, running: Running, folder: Path, checkpoints: Path) -> bool:
    """Do what `plan` says to the rank that waits in `folder`, and let it go.

    Return whether the fault hit the training, which may be over before a delay is.
    """
    rank = psutil.Process(int((folder / REACHED).read_text()))
    if plan.fault == "full disk":
        fill(checkpoints, free=int(plan.share * CHECKPOINT))
    if plan.fault not in SIGNALS:
        own = f"the drill's own on rank {plan.rank}"
        put(folder / STRUCK, own if plan.fault == "exception" else "")
        return True
    if plan.delay:
        put(folder / STRUCK, "")
        time.sleep(plan.delay)
    over = (checkpoints / LAST).exists()  # then the rank, or the whole job, may be gone
    with suppress(*GONE) if over else nullcontext():
        send(SIGNALS[plan.fault], plan, running, rank)
        over = over or (checkpoints / LAST).exists()  # it was written just before the signal
        if plan.fault == "pause":
            time.sleep(plan.share * TIMEOUT / 3)
            rank.send_signal(signal.SIGCONT)
    put(folder / STRUCK, "")
    return not over


def send(number: signal.Signals, plan: Plan, running: Running, rank: psutil.Process) -> None:
    """Send a signal to the rank, or to all: Ctrl-C as a terminal does, SIGTERM as schedulers do."""
    if not plan.to_all:
        rank.send_signal(number)
    elif number == signal.SIGINT:
        os.killpg(running.process.pid, number)
    elif plan.launcher == "srun":
        job = rank.environ()["SLURM_JOB_ID"]
        slurm("scancel", f"--signal={number}", job)
    else:
        running.process.send_signal(number)


def slurm(*command: str) -> None:
    """Run a command of Slurm; CalledProcessError where it fails."""
    environment = clean_environment() | slurm_environment()
    subprocess.run(command, env=environment, timeout=30, check=True, capture_output=True)


def damage(plan: Plan, path: Path) -> None:
    """Cut `path` short, or turn over one of its bits."""
    content = bytearray(path.read_bytes())
    place = int(plan.share * len(content))
    if plan.fault == "truncate":
        del content[place:]
    else:
        content[place] ^= 1 << plan.nth % 8
    path.write_bytes(content)


def fill(folder: Path, free: int) -> None:
    """Leave at most `free` bytes of the disk that holds `folder`."""
    disk = os.statvfs(folder)
    (folder / FILLER).write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - free)))


@contextmanager
def small_disk(launcher: str, folder: Path) -> Iterator[Path]:
    """Mount a small tmpfs at `folder` where rank 0 runs; yield the path to it from here.

    The hosts of the local cluster have mounts of their own, to which /proc leads.
    """
    host = os.getpid() if launcher != "srun" else host_process()
    there = ["nsenter", f"--target={host}", "--mount"]
    folder.mkdir(exist_ok=True)
    mount(*there, "mount", "-t", "tmpfs", "-o", f"size={DISK}", "drill", str(folder))
    try:
        yield Path(f"/proc/{host}/root{folder}")
    finally:
        mount(*there, "umount", "--lazy", str(folder))  # lazy: also with a process left in it


def why_no_small_disk(launcher: str, folder: Path) -> str:
    """Return why none can be mounted for rank 0, in a line; nothing if one can."""
    try:
        with small_disk(launcher, folder):
            return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def mount(*command: str) -> None:
    """Run a command that mounts or unmounts; raise OSError with what it says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"a small disk cannot be mounted: {done.stderr.strip()}")
