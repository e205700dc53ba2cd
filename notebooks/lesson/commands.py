"""`%load_ext lesson`: an empty folder with the scripts, and commands that a reader can type."""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from . import myddp

ROOT = Path(__file__).resolve().parents[2]


def load_ipython_extension(_shell: object) -> None:
    """Go to a folder that looks like the project's root and goes when the kernel ends."""
    # for `lesson` and `exercises`, and the small GPT of scripts/
    sys.path += [str(ROOT / "notebooks"), str(ROOT)]
    hide_gpus()
    own = str(Path(sys.executable).parent)  # where this environment's torchrun is
    os.environ["PATH"] = os.pathsep.join([own, os.environ["PATH"]])
    # One thread a rank, and without the banner by which torchrun says that it chose so.
    os.environ.update(PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
    folder = Path(tempfile.mkdtemp(prefix="ddp-notebook-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("scripts", "datautils.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "myddp.py").write_text(myddp.source())
    os.chdir(folder)


def hide_gpus() -> None:
    """Hide the GPUs from this notebook and all that it starts, so that its outputs are the same.

    DDP_COURSE_GPUS=1 leaves them visible if there are two, for readers who want to use them.
    """
    if os.environ.get("DDP_COURSE_GPUS") == "1":
        if (gpus := torch.cuda.device_count()) >= 2:
            return
        print(f"fewer GPUs ({gpus}) than ranks (2): this notebook uses the CPU")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
