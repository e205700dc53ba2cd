"""Run real commands with a deadline, and leave no process behind."""

import os
import random
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
MARK = "DDP_TEST_RUN"  # every process of a run inherits it, whatever session it moves to
FRESH = "DDP_TEST_FRESH"  # warm_start.py starts a fresh interpreter where it is set
LAUNCH_VARIABLES = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_")
LAUNCH_NAMES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}


@dataclass(frozen=True)
class Result:
    """What a finished command wrote, and its exit code (negative: the signal that ended it)."""

    stdout: str
    stderr: str
    code: int


class Running:
    """A command in the background; on leaving the `with`, nothing of it is left, or it is an error.

    Python is forked from a process that has imported torch (warm_start.py), unless it is `fresh`.
    Standard output and error go to files, so that a test can read them while the command runs.
    """

    def __init__(
        self,
        *command: str | Path,
        cwd: Path,
        env: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        fresh: bool = False,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.out, self.err = cwd / f"{self.mark}.out", cwd / f"{self.mark}.err"
        own = {MARK: self.mark} | ({FRESH: "1"} if fresh else {})
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                cwd=cwd,
                env=clean_environment() | own | (env or {}),
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.process.poll()
        if self.process.returncode is None:  # the test failed, or ends the command this way
            self.kill()
            self.process.wait()
        left = self._settle()
        self.kill()
        assert kind or not left, f"processes left behind: {left}"

    def processes(self) -> list[psutil.Process]:
        """Return every live process of this run, wherever it has moved."""
        return marked(self.mark)

    def wait(self, timeout: float = 240) -> Result:
        """Return the result; past `timeout` seconds everything is killed and the test fails."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end within {timeout} s\n{self.text()}") from None
        return Result(without_gloo(self.out.read_text()), self.err.read_text(), code)

    def kill(self) -> None:
        """Send SIGKILL to every process of this run."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def text(self) -> str:
        """Return all that was written so far."""
        return self.out.read_text() + self.err.read_text()

    def wait_for(self, text: str, timeout: float = 60) -> str:
        """Return all output once it contains `text`; fail after `timeout` seconds or at the end."""
        deadline = time.monotonic() + timeout
        while text not in self.text():
            over = self.process.poll() is not None and text not in self.text()
            assert not over and time.monotonic() < deadline, f"{text!r} not in:\n{self.text()}"
            time.sleep(0.02)
        return self.text()

    def _settle(self, seconds: float = 10) -> list[str]:
        """Return the processes that are still there after a short while to finish exiting."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [str(process) for process in left]


def free_port() -> int:
    """Return a port that nobody uses, below those that Linux hands out by itself.

    Between this call and its use, a test beside this one would be given any other free port.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)  # the global one is seeded alike
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def without_gloo(text: str) -> str:
    """Leave out the lines that gloo of torch 2.8 prints whenever a group opens."""
    theirs = r"^.*(\[Gloo\] Rank|Expected number of connected peer ranks).*\n"
    return re.sub(theirs, "", text, flags=re.MULTILINE)


def marked(mark: str) -> list[psutil.Process]:
    """Return every live process that has inherited `mark`, whoever started it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def run(
    *command: str | Path,
    cwd: Path,
    timeout: float = 240,
    env: dict[str, str] | None = None,
    fresh: bool = False,
) -> Result:
    """Run a command to its end in `cwd`; fail past `timeout` seconds or if it leaves a process."""
    with Running(*command, cwd=cwd, env=env, fresh=fresh) as running:
        return running.wait(timeout)


def wait_until(condition: Callable[[], object], timeout: float = 60) -> None:
    """Return once `condition` is true; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not come true"
        time.sleep(0.05)


def torchrun(nproc: int, *script: str | Path, restarts: int = 0) -> list[str | Path]:
    """Return the command that starts `script` in `nproc` processes on a free port."""
    options = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *script]


def clean_environment() -> dict[str, str]:
    """Return this environment without what a launcher may have set, one thread a process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_NAMES and not name.startswith(LAUNCH_VARIABLES)
    }
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
