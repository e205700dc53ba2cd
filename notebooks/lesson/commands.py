"""Commands as a reader would type them in the project's root, with a deadline."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "DDP_NOTEBOOK_COMMAND"  # what a command starts inherits it, whatever session it moves to
ROOT = Path(__file__).resolve().parents[2]


def hide_gpus() -> None:
    """Hide the GPUs from this notebook and all that it starts, so that its outputs are the same.

    DDP_COURSE_GPUS=1 leaves them visible, for readers who want to run the chapters on GPUs. Ranks
    share a GPU if there are too few.
    """
    if os.environ.get("DDP_COURSE_GPUS") == "1":
        os.environ["DDP_SHARE_GPUS"] = "1"
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def scratch_folder() -> Path:
    """Make a folder that looks like the project's root; it goes when the kernel ends."""
    folder = Path(tempfile.mkdtemp(prefix="ddp-notebook-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("scripts", "datautils.py"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def load_ipython_extension(_shell: object) -> None:
    """`%load_ext lesson` goes to a scratch folder, where `!torchrun` is this environment's."""
    sys.path.append(str(ROOT / "notebooks"))  # for `lesson` and `exercises`
    hide_gpus()
    os.environ.update(_environment())
    os.chdir(scratch_folder())


def shell(command: str, *, folder: Path | None = None, timeout: float = 120) -> str:
    """Print `command` and what it writes, and return that; `folder` is where it runs.

    `python` and `torchrun` are this environment's. A command that fails is no error: its exit code
    is printed. Past `timeout` seconds it is killed with all that it started: TimeoutError.
    """
    print(f"$ {command}", flush=True)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder or scratch_folder(),
        env=_environment() | {MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        _kill_all(mark)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"no end within {timeout} s: {command}") from None
        raise
    print(text, end="")
    if process.returncode:
        print(f"exit code {process.returncode}")
    return text


def _kill_all(mark: str) -> None:
    """Kill every process that has inherited `mark`; torchrun's ranks have a session each."""
    while found := [process for process in psutil.process_iter() if _is_marked(process, mark)]:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != "zombie" and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # One thread a rank, and without the banner by which torchrun says that it chose so.
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
