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
from types import ModuleType

import psutil

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
MARK = "DDP_TEST_RUN"  # all processes of a run inherit this variable, in any session
FRESH = "DDP_TEST_FRESH"  # if it is set, warm_start.py starts a fresh interpreter
# For a script that imports modules of tests/.
TESTS = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
LAUNCH_VARIABLES = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_")
LAUNCH_NAMES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
LAUNCH_NAMES |= {"ARGS", "MAKEFLAGS", "PYTHON", "TORCH"}  # `make test ARGS=...` sets them


def public_names() -> set[str]:
    """Return the names that `import ddp_ref` offers, without its modules."""
    import ddp_ref

    named = vars(ddp_ref).items()
    return {name for name, value in named if name[0] != "_" and not isinstance(value, ModuleType)}


@dataclass(frozen=True)
class Result:
    """The output of a finished command, and its exit code. Negative: the signal that ended it."""

    stdout: str
    stderr: str
    code: int


class Running:
    """A command in the background. When its `with` block ends, no process of it may be left.

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
        if self.process.poll() is None:  # the test failed, or it ends the command like this
            self.kill()
            self.process.wait()
        left = settle(self.mark)
        self.kill()
        assert kind or not left, f"processes left behind: {left}"

    def processes(self) -> list[psutil.Process]:
        """Return every live process of this run, whatever its parent or session."""
        return marked(self.mark)

    def wait(self, timeout: float = 240) -> Result:
        """Return the result. After `timeout` seconds, kill all processes and fail."""
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
        """Return the output so far."""
        return self.out.read_text() + self.err.read_text()

    def wait_for(self, text: str, timeout: float = 60) -> str:
        """Return the output once it contains `text`. Fail if the command ends or the time is up."""
        deadline = time.monotonic() + timeout
        while text not in self.text():
            over = self.process.poll() is not None and text not in self.text()
            assert not over and time.monotonic() < deadline, f"{text!r} not in:\n{self.text()}"
            time.sleep(0.02)
        return self.text()


class Evil:
    """Makes a folder if its pickle is loaded without weights_only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def free_port() -> int:
    """Return a free port below the range from which Linux assigns ports by itself.

    Linux could give a port of its own range to another test before the caller uses it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)  # tests seed the global generator
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def listens(port: int) -> bool:
    """Return whether something accepts connections on the port."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def without_gloo(text: str) -> str:
    """Remove the lines that gloo in torch 2.8 prints whenever a group opens."""
    theirs = r"^.*(\[Gloo\] Rank|Expected number of connected peer ranks).*\n"
    return re.sub(theirs, "", text, flags=re.MULTILINE)


def marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """Return every live process that has inherited `mark`."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(variable) == mark and process.status() != "zombie":
                processes.append(process)
    return processes


def settle(mark: str, seconds: float = 10) -> list[psutil.Process]:
    """Give the processes with `mark` a short time to exit, and return those that are left."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def run(
    *command: str | Path,
    cwd: Path,
    timeout: float = 240,
    env: dict[str, str] | None = None,
    fresh: bool = False,
) -> Result:
    """Run a command in `cwd`. Fail after `timeout` seconds, or if it leaves a process behind."""
    with Running(*command, cwd=cwd, env=env, fresh=fresh) as running:
        return running.wait(timeout)


def wait_until(condition: Callable[[], object], timeout: float = 60) -> None:
    """Wait until `condition` is true. Fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not come true"
        time.sleep(0.05)


def torchrun(nproc: int, *script: str | Path, restarts: int = 0) -> list[str | Path]:
    """Return the command that starts `script` in `nproc` processes on a free port."""
    options = ["--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
    # A signal ends torchrun while its heartbeat thread still runs. If that thread, which wakes up
    # every 5 s, uses the store at that moment, torchrun aborts. So let it sleep for an hour.
    options.append("--rdzv-conf=keep_alive_interval=3600")
    return [sys.executable, "-m", "torch.distributed.run", *options, *script]


def clean_environment() -> dict[str, str]:
    """Return this environment for one thread per process, without what launchers and make set."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_NAMES and not name.startswith(LAUNCH_VARIABLES)
    }
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
