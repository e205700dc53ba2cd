"""Chapter 09: the reader's script passes the checks of sanity.py, and trains like the original."""

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

import torch
from lesson import Exercise
from lesson.exercise import ALONE

RUNNER = Path(__file__).resolve().with_name("small_gpt_runner.py")
ROOT = RUNNER.parents[2]  # for scripts/sanity.py
ORIGINAL = ROOT / "scripts/small_gpt.py"
LIMIT = 60  # seconds for a launch: more than the runner gives to a rank, which ends by itself
# The training set has 96 rows: 2 epochs of 6 steps, each of 2 microbatches of 8 rows in total.
FLAGS = ["--epochs=2", "--characters=7000"]

Run = list[dict[str, Any]]  # what each rank of a launch did, in rank order


def observe(my_script: Callable[[], Any]) -> tuple[Run, Run] | str:
    """Start the script on two ranks and then, with the same global batches, the original."""
    script = Path(my_script()).resolve()
    if not script.is_file():
        return f"there is no file {script.name!r} in the folder {str(script.parent)!r}"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with TemporaryDirectory() as two, TemporaryDirectory() as one:
        _run([*torchrun, str(RUNNER), two, str(script), *FLAGS, "--batch_size=4"])
        run = [_read(Path(two, str(rank)), script) for rank in range(2)]
        if _unfinished(run):
            return run, []
        drawn = zip(*(rank["drawn"] for rank in run), strict=True)
        order = [_merge(*epoch) for epoch in drawn]
        Path(one, "order.json").write_text(json.dumps(order))
        _run([str(RUNNER), one, str(ORIGINAL), *FLAGS, "--batch_size=8"])
        return run, [_read(Path(one, "0"), ORIGINAL)]


def _merge(first: list[int], other: list[int]) -> list[int]:
    """Return the order for batches of 8 in one process, each of two ranks' batches of 4."""
    pairs = zip(*(torch.tensor(drawn).split(4) for drawn in (first, other)), strict=True)
    return torch.cat([part for pair in pairs for part in pair]).tolist()


def _run(arguments: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command, env = [sys.executable, *arguments], os.environ | variables
    with suppress(subprocess.TimeoutExpired):  # then a rank's report is missing
        subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT
        )


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
    return _unfinished(two) or _not_rank_0_alone(two) or _unequal(two[0], one[0])


def _unfinished(run: Run) -> str | None:
    if failed := [rank for rank in run if rank.get("error")]:
        first = min(failed, key=lambda rank: rank["ended"])
        place = f" ({first['place']})" if first["place"] else ""
        return f"{ALONE if 'by peer' in first['error'] else first['error']}{place}"
    lines = [f"rank {n} in line {rank['hangs']}" for n, rank in enumerate(run) if "hangs" in rank]
    if lines:
        return f"your script hangs: {', '.join(lines)}"
    if not all(run):
        return "a rank was killed"
    epochs, steps = len(run[0]["drawn"]), len(run[0]["rates"])
    if epochs != 2 or not steps:
        done = f"{epochs} epochs from a DataLoader and takes {steps} steps"
        return f"your script draws {done}, but --epochs is 2"
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
    """Compare two ranks with the original, which has drawn the same global batches."""
    rates, right = two["rates"], one["rates"]
    if len(rates) != len(right):
        return f"two ranks take {len(rates)} optimizer steps, but the original takes {len(right)}"
    for step, (rate, wanted) in enumerate(zip(rates, right, strict=True), start=1):
        if abs(rate - wanted) > 1e-3 * max(right):
            return (
                f"in step {step} of {len(right)}, the learning rate is {rate:.2g} on two ranks and "
                f"{wanted:.2g} in the original: does the schedule count the steps of one process?"
            )
    for norm, wanted in zip(two["norms"], one["norms"], strict=False):
        if not abs(norm / wanted - 1) < 0.01:
            return (
                f"before the clipping, the norm of the gradient is {norm:.3g}, but {wanted:.3g} in "
                "the original: look for a wrong factor, such as in the loss"
            )
    pairs = [(two["weights"][name], weight) for name, weight in one["weights"].items()]
    off = max((weight - other).abs().max().item() for weight, other in pairs)
    if not off < 1e-3:  # the solution: 4e-6
        return (
            f"the weights of two ranks and of the original differ by up to {off:.1g}: "
            "look for something that is missing, such as the clipping"
        )
    losses = [re.findall(r"(\w* ?loss) (\d+\.\d+|nan)", run["printed"]) for run in (two, one)]
    if [name for name, _ in losses[0]] != [name for name, _ in losses[1]]:
        return "rank 0 does not print a train loss and a validation loss for each epoch"
    for (name, loss), (_, wanted) in zip(*losses, strict=True):
        if not abs(float(loss) - float(wanted)) < 1e-3:
            return (
                f"rank 0 prints {name} {loss}, but the original {wanted}: sum the loss over all "
                "ranks, and divide by the count of all ranks"
            )
    return None


EXERCISES = {"my_script": Exercise(observe, judge, nproc=0)}
