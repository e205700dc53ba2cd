"""Chapter 09: the reader's script passes the checks of sanity.py, and trains like one process."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from lesson import Exercise
from lesson.exercise import ALONE

RUNNER = Path(__file__).resolve().with_name("small_gpt_runner.py")
ROOT = RUNNER.parents[2]  # for scripts/sanity.py
LIMIT = 90  # seconds for both launches: more than the runner gives to a rank
# The training set has 96 rows: 2 epochs of 6 steps, each of 2 microbatches of 8 rows in total.
FLAGS = ["--epochs=2", "--characters=7000"]
# One rank needs no torchrun, only its variables.
ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}

Run = list[dict[str, Any]]  # what each rank of a launch did, in rank order


def observe(my_script: Callable[[], Any]) -> tuple[Run, Run] | str:
    """Start the script on two ranks and, with twice the batch size, on one."""
    script = Path(my_script()).resolve()
    if not script.is_file():
        return f"there is no file {script.name!r} in the folder {str(script.parent)!r}"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with TemporaryDirectory() as two, TemporaryDirectory() as one:
        launches = [
            _start([*torchrun, str(RUNNER), two, str(script), *FLAGS, "--batch_size=4"], {}),
            _start([str(RUNNER), one, str(script), *FLAGS, "--batch_size=8"], ONE),
        ]
        try:
            with suppress(subprocess.TimeoutExpired):  # then a rank is missing below
                for launch in launches:
                    launch.wait(LIMIT)
        finally:
            for launch in launches:
                _kill(launch)
        two_ranks = [_read(Path(two, str(rank)), script) for rank in range(2)]
        return two_ranks, [_read(Path(one, "0"), script)]


def _start(arguments: list[str], variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | variables,
        stdin=nowhere,
        stdout=nowhere,
        stderr=nowhere,
    )


def _kill(launch: "subprocess.Popen[bytes]") -> None:
    """End a launch and all its processes, if it has not ended."""
    if launch.poll() is None:
        for process in psutil.Process(launch.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launch.kill()
        launch.wait()


def _read(folder: Path, script: Path) -> dict[str, Any]:
    """Return what a rank wrote down, with its `weights`; or where it hangs; or nothing."""
    report, stack, weights = (folder / name for name in ("seen.json", "stack", "small_gpt.pt"))
    if report.exists():
        seen: dict[str, Any] = json.loads(report.read_text())
        loads = weights.exists() and not seen["error"]
        return seen | {"weights": torch.load(weights, weights_only=True) if loads else None}
    lines = re.findall(f'File "{re.escape(str(script))}", line (\\d+)', _text(stack))
    return {"hangs": lines[0]} if lines else {}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def judge(seen: list[Any]) -> str | None:
    if isinstance(seen[0], str):
        return seen[0]
    two, one = seen[0]
    return (
        _unfinished(two, "on two ranks")
        or _unfinished(one, "on one rank")
        or _not_rank_0_alone(two)
        or _unequal(two[0], one[0])
    )


def _unfinished(run: Run, where: str) -> str | None:
    if failed := [rank for rank in run if rank.get("error")]:
        first = min(failed, key=lambda rank: rank["ended"])
        place = f" ({first['place']})" if first["place"] else ""
        return f"{where}, {ALONE if 'by peer' in first['error'] else first['error']}{place}"
    lines = [f"rank {n} in line {rank['hangs']}" for n, rank in enumerate(run) if "hangs" in rank]
    if lines:
        return f"{where}, your script hangs: {', '.join(lines)}"
    if not all(run):
        return f"{where}, a rank was killed"
    if run[0]["epochs"] < 2 or not run[0]["rates"]:
        done = f"{run[0]['epochs']} epochs from a DataLoader and takes {len(run[0]['rates'])} steps"
        return f"{where}, your script draws {done}, but --epochs is 2"
    return None


def _not_rank_0_alone(run: Run) -> str | None:
    first, other = run
    if other["printed"]:
        return f"rank 1 prints {other['printed'].splitlines()[0]!r}: only rank 0 should print"
    if other["weights"] is not None:
        return "rank 1 saves, too: if two ranks write to one file, they can damage it"
    weights = first["weights"] or {"": None}
    if not all(isinstance(weight, torch.Tensor) for weight in weights.values()):
        return "rank 0 does not save a state_dict as `small_gpt.pt`"
    if names := [name for name in weights if name.startswith("module.")]:
        return (
            f"the file has keys such as {names[0]!r}, so a plain GPT cannot load it: save the "
            "state_dict of the model inside DDP"
        )
    if max(first["reduced"]) > 1:
        return (
            f"DDP reduces {max(first['reduced'])} microbatches per step. The result is right, but "
            "once is enough: forward and backward of all but the last belong under no_sync"
        )
    return None


def _unequal(two: dict[str, Any], one: dict[str, Any]) -> str | None:
    """Compare two ranks with one process that has the same global batch."""
    rates, right = two["rates"], one["rates"]
    if len(rates) != len(right):
        return f"two ranks take {len(rates)} optimizer steps, but one process takes {len(right)}"
    for step, (rate, wanted) in enumerate(zip(rates, right, strict=True), start=1):
        if abs(rate - wanted) > 1e-3 * max(right):
            return (
                f"in step {step} of {len(right)}, the learning rate is {rate:.2g} on two ranks and "
                f"{wanted:.2g} in one process: does the schedule count the steps of one process?"
            )
    pairs = [(two["weights"][name], weight) for name, weight in one["weights"].items()]
    off = max((weight - other).abs().max().item() for weight, other in pairs)
    if not off < 1e-3:  # the solution: 4e-6
        return (
            f"the weights of two ranks and of one process differ by up to {off:.1g}: look for a "
            "factor, such as in the loss, that depends on the number of ranks"
        )
    losses = [re.findall(r"(\w* ?loss) (\d+\.\d+|nan)", run["printed"]) for run in (two, one)]
    for (name, loss), (_, wanted) in zip(*losses, strict=False):
        if not abs(float(loss) - float(wanted)) < 1e-3:
            return (
                f"rank 0 prints {name} {loss}, but one process {wanted}: sum the loss over all "
                "ranks, and divide by the count of all ranks"
            )
    return None


EXERCISES = {"my_script": Exercise(observe, judge, nproc=0)}
