"""How long the scripts take beyond a job that does nothing, and importing ddp_ref beyond torch.

The jobs are whole commands, from start to exit. The bare job opens and closes a group of two ranks
under torchrun. The scripts also read the digits with scikit-learn, and train and test for one
epoch. The imports are timed inside a new process. The noise of torch's own import is larger than
what `ddp_ref` adds, so for the goal we import torch first, and time only `from ddp_ref import *`.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from page import ROOT
from side_by_side import AGAIN, compare, middle, side_by_side, timed
from tables import Table, goal

ROUNDS = 12
PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SCRIPTS = ROOT / "scripts"
CONFIG = f"--config={SCRIPTS}/configs/digits.yaml"
REFERENCE = [f"{SCRIPTS}/train_reference.py", CONFIG, "--set", "training.num_epochs=1"]
BARE, TORCH = "torchrun bare.py", "import torch"
ALL_NAMES = "from ddp_ref import *"
OURS = f"{TORCH}; {ALL_NAMES}"
MOST_MS = 50


def measure(rounds: int) -> list[Table]:
    jobs = compare(side_by_side(jobs_by_name(), rounds), BARE)
    added: list[float] = []
    imports = compare(side_by_side(imports_by_name(added), rounds), TORCH)
    own, low, high = middle(1000 * np.array(added[-rounds:]))  # without the warm-up round
    reached = goal(
        f"{ALL_NAMES} takes at most {MOST_MS} ms, after torch's import",
        f"{own:.0f} ms, {low:.0f} to {high:.0f}",
        None if low < MOST_MS <= high else own < MOST_MS,
    )
    return [Table("a job", jobs, []), Table("an import", imports, [reached])]


def jobs_by_name() -> dict[str, Callable[[], float]]:
    bare = command(*TORCHRUN, f"{ROOT}/benchmarks/bare.py")
    return {
        BARE: bare,
        BARE + AGAIN: bare,
        "torchrun multigpu_torchrun.py": command(*TORCHRUN, f"{SCRIPTS}/multigpu_torchrun.py", "1"),
        "torchrun train_reference.py": command(*TORCHRUN, *REFERENCE),
        "multigpu_spawn.py": command(PYTHON, f"{SCRIPTS}/multigpu_spawn.py", "1", "--nproc=2"),
        "train_reference.py --nproc 2": command(PYTHON, *REFERENCE, "--nproc=2"),
    }


def imports_by_name(added: list[float]) -> dict[str, Callable[[], float]]:
    """Return functions that time imports.

    The last one also appends the seconds of its second import to `added`.
    """

    def torch() -> float:
        return sum(import_times(TORCH))

    def both() -> float:
        first, second = import_times(TORCH, ALL_NAMES)
        added.append(second)
        return first + second

    return {TORCH: torch, TORCH + AGAIN: torch, OURS: both}


def command(*words: str) -> Callable[[], float]:
    """Return a function that times a command from start to exit, in a new folder each time."""

    def variant() -> float:
        with TemporaryDirectory() as folder:
            return timed(partial(output_of, *words, folder=folder))()

    return variant


def import_times(*imports: str) -> list[float]:
    """Return the seconds that each import takes in a new process, one after the other."""
    lines = ["import time", "times = [time.perf_counter()]"]
    for statement in imports:
        lines += [statement, "times.append(time.perf_counter())"]
    times = output_of(PYTHON, "-c", "; ".join([*lines, "print(*times)"])).split()
    return [float(end) - float(start) for start, end in pairwise(times)]


def output_of(*words: str, folder: str | Path = ROOT) -> str:
    """Run a command; return what it printed. RuntimeError, with its stderr, if it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)} has failed:\n{ended.stderr}")
    return ended.stdout
