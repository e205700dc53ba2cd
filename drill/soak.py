"""Train scripts/char_gpt.py for an hour with a fault about every two minutes, on two ranks.

.venv/bin/python drill/soak.py --seed 1 [--epochs 420] [--markdown docs/fault-drill.md]

There are two runs: one without a fault, and one in which a random fault ends or pauses the job
again and again. Each time that it ends, the soak starts it again with the same flags, under
torchrun and with --nproc in turn. Both runs must end at the same weights and history, bit for
bit, and no process may hang, grow or stay behind. Both runs are kept in --folder. If you interrupt
the soak, run the same command again: it repeats the fault-free run unless that was complete, and
continues the run with faults. Flags of char_gpt.py may follow after "--".
"""

import argparse
import json
import math
import shlex
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # harness.py and page.py

import torch  # noqa: E402
from attempts import Attempt, run_once  # noqa: E402
from judge import Weights, Wrong, check_equal  # noqa: E402
from launchers import CHECKPOINTS  # noqa: E402
from page import machine, put_between, require_marks  # noqa: E402
from report import aligned  # noqa: E402
from saved import code_version  # noqa: E402

from ddp_ref.training import checkpoint  # noqa: E402

MARKS = "<!-- begin of what the soak has written -->", "<!-- end of the soak -->"
FAULT_FREE, WITH_FAULTS = "fault-free", "with-faults"  # the runs, and their folders
PROCESSES = "launcher", "rank 0", "rank 1"
FAILED = "wrong.txt"  # has the error of a run that failed
# MiB that a process may grow after its first minute. When we watched a rank of 240 MiB, it stayed
# within 0.1 for 150 epochs, then jumped by 8 and fell again by 3. A leak of 170 bytes in each step
# of an hour would be above the limit.
LIMIT = 20
TRIAL = 600  # seconds: in a shorter run, every attempt may be too short to measure its growth

Attempts = list[Attempt]
# Of a process: how many attempts there were, the highest peak, and the growth in each attempt that
# was long enough to measure it.
Memories = tuple[int, float, list[float]]


def run_all(args: argparse.Namespace, run: str) -> Attempts:
    """Start the job until the run is complete, and return all its attempts, also earlier ones."""
    folder, limit = args.folder / run, args.faults if run == WITH_FAULTS else 0
    file = folder / "attempts.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    attempts = [Attempt(**json.loads(line)) for line in lines]
    if run == FAULT_FREE and not attempts:
        rmtree(folder, ignore_errors=True)  # this run must be a single attempt
    folder.mkdir(parents=True, exist_ok=True)
    while not attempts or attempts[-1].code:
        check_settings(args)
        enough = sum(len(attempt.faults) for attempt in attempts) >= limit
        every = math.inf if enough else args.every
        attempts.append(run_once(args, folder, len(attempts), every))
        with file.open("a") as lasting:
            lasting.write(json.dumps(asdict(attempts[-1])) + "\n")
        print(f"{run} {len(attempts)} | {attempts[-1]}", flush=True)
    return attempts


def problems(args: argparse.Namespace, runs: dict[str, Attempts]) -> list[str]:
    """Return a line for each thing that is wrong with the two runs."""
    lines = []
    for run, attempts in runs.items():
        for (launcher, name), (_, _, grown) in memories(attempts).items():
            what = f"{run}, {launcher}: {name}"
            if max(grown, default=0) > LIMIT:
                lines.append(f"{what} grew by {max(grown):.1f} MiB, more than {LIMIT}")
            if not grown and name in PROCESSES and seconds(attempts) > TRIAL:
                lines.append(f"{what} was not measured for growth")
    try:
        end, expected = (final_state(args, run) for run in (WITH_FAULTS, FAULT_FREE))
        check_equal(weights(end), weights(expected), f"the weights at the end, step {end['step']}")
        for name in ("step", "history"):
            if end[name] != expected[name]:
                raise Wrong(f"{name} at the end: {end[name]}, not {expected[name]}")
    except Wrong as error:
        lines.append(str(error))
    return lines


def memories(attempts: Attempts) -> dict[tuple[str, str], Memories]:
    """Return the memory of each process, by launcher and name."""
    processes = {}
    for launcher in sorted({own.launcher for own in attempts}, reverse=True):  # torchrun first
        same = [own for own in attempts if own.launcher == launcher]
        for name in sorted(set(PROCESSES).union(*(own.peaks for own in same))):
            grown = [mib for own in same if (mib := own.growths.get(name)) is not None]
            peak = max(own.peaks.get(name, 0) for own in same)
            processes[launcher, name] = len(same), peak, grown
    return processes


def seconds(attempts: Attempts) -> float:
    return sum(attempt.trained for attempt in attempts)


def final_state(args: argparse.Namespace, run: str) -> dict[str, Any]:
    """Return the last checkpoint of a run; raise Wrong if epochs are missing."""
    paths = checkpoint.numbered(args.folder / run / CHECKPOINTS)
    state = checkpoint.read(paths[-1])
    if state["epoch"] != args.epochs:
        raise Wrong(f"{run}: the last checkpoint is of epoch {state['epoch']}, not {args.epochs}")
    return state


def weights(state: dict[str, Any]) -> Weights:
    return {n: value for n, value in state["model"].items() if isinstance(value, torch.Tensor)}


def report(args: argparse.Namespace, runs: dict[str, Attempts]) -> str:
    """Return the summary as Markdown."""
    attempts = runs[WITH_FAULTS]
    faults = Counter(fault for attempt in attempts for fault in attempt.faults)
    counts = ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items()))
    minutes = {run: seconds(runs[run]) / 60 for run in runs}
    words = (
        f"{args.epochs} epochs, {final_state(args, WITH_FAULTS)['step']:,} steps. "
        f"The fault-free run trained for {minutes[FAULT_FREE]:.0f} minutes, and the run with "
        f"faults for {minutes[WITH_FAULTS]:.0f} minutes in {len(attempts)} attempts, with "
        f"{faults.total()} faults: {counts}. "
        "Both ended at the same weights and history, bit for bit."
    )
    rows = [["run", "launcher", "measured attempts", "peak", "growth"]]
    for run, own in runs.items():
        measured = memories(own)
        for launcher in dict.fromkeys(launcher for launcher, _ in measured):
            processes = [memory for key, memory in measured.items() if key[0] == launcher]
            rows.append([run, launcher, *largest(processes)])
    about = f"`{command_line(args)}`\non {machine(['torch'])}"
    return f"{about}\n\n{words}\n\n{aligned(rows)}"


def largest(processes: Sequence[Memories]) -> list[str]:
    """Return the fewest measured attempts, the highest peak and the largest growth of any."""
    attempts = processes[0][0]
    measured = min(len(grown) for _, _, grown in processes)
    peak = max(peak for _, peak, _ in processes)
    growth = max((mib for _, _, grown in processes for mib in grown), default=None)
    shown = "" if growth is None else f"{growth:.1f} MiB"
    return [f"{measured} of {attempts}", f"{peak:.0f} MiB", shown]


def command_line(args: argparse.Namespace) -> str:
    parts = [".venv/bin/python", "drill/soak.py"]
    for name in ("seed", "epochs", "every", "faults"):
        if (value := getattr(args, name)) != math.inf:
            parts += [f"--{name}", str(value).removesuffix(".0")]
    return shlex.join(parts + (["--", *args.flags] if args.flags else []))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=420, help="of each run (420, an hour)")
    parser.add_argument("--every", type=float, default=120, help="seconds between faults (120)")
    parser.add_argument(
        "--faults", type=float, default=math.inf, help="later attempts have none (no limit)"
    )
    parser.add_argument("--seed", type=int, default=0, help="what the faults are drawn from (0)")
    parser.add_argument(
        "--folder", type=Path, default="runs/soak", help="for both runs (runs/soak)"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the summary there too")
    parser.add_argument("flags", nargs="*", help="of char_gpt.py, after --")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    if args.epochs < 1 or not 0 < args.every < math.inf:
        parser.error("--epochs and --every must be above 0 and finite")
    require_marks(parser, args.markdown, MARKS)
    return args


def check_settings(args: argparse.Namespace) -> None:
    """Exit with an error if the folder has runs of other settings, of other code, or a failed run.

    It is called before each start of the job, because the code may change meanwhile.
    """
    file, settings = args.folder / "settings.txt", f"{command_line(args)} | {code_version()}"
    if file.exists() and (old := file.read_text()) != settings:
        sys.exit(f"error: {args.folder} has runs of {old}, not {settings}: give another --folder")
    for failed in args.folder.glob(f"*/{FAILED}"):
        sys.exit(f"error: a run failed before, see {failed}: delete its folder to run it again")
    args.folder.mkdir(parents=True, exist_ok=True)
    file.write_text(settings)


def main() -> None:
    args = parse()
    check_settings(args)
    # A shell's background job ignores Ctrl-C, and the soak's job would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left
    runs: dict[str, Attempts] = {}
    for run in (FAULT_FREE, WITH_FAULTS):
        try:
            runs[run] = run_all(args, run)
        except Exception as error:  # noqa: BLE001 - whatever it is, running again must not hide it
            failed = args.folder / run / FAILED
            failed.write_text(traceback.format_exc())
            sys.exit(f"WRONG: {error} (see {failed})")
    if wrong := problems(args, runs):
        sys.exit("\n".join(f"WRONG: {line}" for line in wrong))
    print(f"\n{report(args, runs)}")
    if args.markdown:
        put_between(args.markdown, *MARKS, report(args, runs))


if __name__ == "__main__":
    main()
