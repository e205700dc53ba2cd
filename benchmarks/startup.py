"""How long the scripts take beyond a job that does nothing, and `import ddp_ref` beyond torch's.

The jobs are whole commands, from start to exit. The bare job opens and closes a group of two ranks
under torchrun. The scripts also read the digits with scikit-learn, and train and test for one
epoch. An import is timed inside a new process, and `import ddp_ref` is timed after torch's.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from side_by_side import AGAIN, compare, middle, side_by_side, timed
from tables import Table, goal

ROUNDS = 12
ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FOLDER = "{folder}"
FLAGS = ["--epochs=1", f"--checkpoint={FOLDER}/checkpoint.pt"]
CONFIG = ["--config=scripts/configs/digits.yaml", "--set", "training.num_epochs=1"]
CONFIG += [f"training.path={FOLDER}"]
BARE, TORCH, OURS = "torchrun bare.py", "import torch", "import ddp_ref, after torch"
MOST_MS = 50


def measure(rounds: int) -> list[Table]:
    jobs = compare(side_by_side(job_ways(), rounds), BARE)
    times = side_by_side(import_ways(), rounds)
    above, low, high = middle(1000 * np.array(times[OURS]))
    text = f"import ddp_ref takes {above:.0f} ms more ({low:.0f} to {high:.0f}), of {MOST_MS} ms"
    reached = goal(text, None if low < MOST_MS <= high else above < MOST_MS)
    return [Table("a job", jobs, []), Table("an import", compare(times, TORCH), [reached])]


def job_ways() -> dict[str, Callable[[], float]]:
    bare = command(*TORCHRUN, "benchmarks/bare.py")
    return {
        BARE: bare,
        BARE + AGAIN: bare,
        "torchrun multigpu_torchrun.py": command(*TORCHRUN, "scripts/multigpu_torchrun.py", *FLAGS),
        "torchrun train_reference.py": command(*TORCHRUN, "scripts/train_reference.py", *CONFIG),
        "multigpu_spawn.py": command(PYTHON, "scripts/multigpu_spawn.py", *FLAGS, "--nproc=2"),
        "train_reference.py --nproc 2": command(
            PYTHON, "scripts/train_reference.py", *CONFIG, "--nproc=2"
        ),
    }


def import_ways() -> dict[str, Callable[[], float]]:
    torch = importing("torch")
    return {TORCH: torch, TORCH + AGAIN: torch, OURS: importing("ddp_ref", first="import torch")}


def command(*words: str) -> Callable[[], float]:
    """Return the way that runs a command to its end, with FOLDER a new one each time."""

    def way() -> float:
        with TemporaryDirectory() as folder:
            line = [word.replace(FOLDER, folder) for word in words]
            return timed(partial(output_of, *line))()

    return way


def importing(name: str, first: str = "import time") -> Callable[[], float]:
    """Return the way that imports `name` in a new process, which has done `first`."""
    lines = [first, "import time", "start = time.perf_counter()", f"import {name}"]
    lines.append("print(time.perf_counter() - start)")
    return lambda: float(output_of(PYTHON, "-c", "; ".join(lines)))


def output_of(*words: str) -> str:
    """Run a command; return what it printed. RuntimeError, with its stderr, if it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)} has failed:\n{ended.stderr}")
    return ended.stdout
