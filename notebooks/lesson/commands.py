"""Commands as a reader would type them in the project's root, with a deadline."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def scratch_folder() -> Path:
    """Make a folder that looks like the project's root; what scripts write lands there."""
    folder = Path(tempfile.mkdtemp(prefix="ddp-notebook-"))
    (folder / "scripts").symlink_to(ROOT / "scripts")
    return folder


def shell(command: str, *, folder: Path | None = None, timeout: float = 120) -> str:
    """Print `command` and what it writes, and return that; `folder` is where it runs.

    `python` and `torchrun` are this environment's. A command that fails is no error: its exit code
    is printed. Past `timeout` seconds it is killed with all that it started: TimeoutError.
    """
    print(f"$ {command}", flush=True)
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder or scratch_folder(),
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"no end within {timeout} s: {command}") from None
        raise
    print(text, end="")
    if process.returncode:
        print(f"exit code {process.returncode}")
    return text


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # One thread a rank, and without the banner by which torchrun says that it chose so.
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
