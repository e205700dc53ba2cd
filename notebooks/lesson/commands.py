"""`%load_ext lesson`: an empty folder with the scripts, and commands that a reader can type."""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load_ipython_extension(_shell: object) -> None:
    """Go to a folder that looks like the project's root and goes when the kernel ends."""
    sys.path.append(str(ROOT / "notebooks"))  # for `lesson` and `exercises`
    hide_gpus()
    own = str(Path(sys.executable).parent)  # where this environment's torchrun is
    os.environ["PATH"] = os.pathsep.join([own, os.environ["PATH"]])
    # One thread a rank, and without the banner by which torchrun says that it chose so.
    os.environ.update(PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
    folder = Path(tempfile.mkdtemp(prefix="ddp-notebook-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("scripts", "datautils.py"):
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)


def hide_gpus() -> None:
    """Hide the GPUs from this notebook and all that it starts, so that its outputs are the same.

    DDP_COURSE_GPUS=1 leaves them visible, for readers who want to run the chapters on GPUs. If
    there are too few, ranks of ddp_ref share a GPU, and the scripts use the CPU.
    """
    if os.environ.get("DDP_COURSE_GPUS") == "1":
        os.environ["DDP_SHARE_GPUS"] = "1"
        os.environ["SBATCH_EXPORT"] = "ALL,DDP_SHARE_GPUS=0"  # ranks on two nodes cannot share
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
