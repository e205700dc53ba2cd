"""Train scripts/char_gpt.py for an hour with a fault about every two minutes, on two ranks.

.venv/bin/python drill/soak.py --seed 1 [--epochs 300] [--markdown docs/fault-drill.md]

There are two runs: one without a fault, and one in which a random fault ends or pauses the job
again and again. Each time that it ends, the soak starts it again with the same flags, under
torchrun and with --nproc in turn. Both runs must end at the same weights, bit for bit, and no
process may hang, grow or stay behind. Both runs are kept in --folder. If you interrupt the soak,
run the same command again: it repeats the fault-free run unless that was complete, and continues
the run with faults. Flags of char_gpt.py may follow after "--".
"""

import argparse
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from shutil import rmtree
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # harness.py and page.py

import psutil  # noqa: E402
import torch  # noqa: E402
from harness import SCRIPTS, Result, Running, torchrun  # noqa: E402
from judge import Weights, Wrong, check_equal, check_kept, check_no_crash  # noqa: E402
from memory import SAMPLE, Memory, growth, ranks  # noqa: E402
from page import machine, put_between, require_marks  # noqa: E402
from report import aligned  # noqa: E402
from rounds import intact  # noqa: E402
from saved import code_version  # noqa: E402

from ddp_ref.training import checkpoint  # noqa: E402

MARKS = "<!-- begin of what the soak has written -->", "<!-- end of the soak -->"
FAULT_FREE, WITH_FAULTS = "fault-free", "with-faults"  # the runs, and their folders
CHECKPOINTS = "run"  # the folder of the checkpoints, in that of the run
FAILED = "wrong.txt"
LAUNCHERS = "torchrun", "--nproc"
DEADLINE = 120  # seconds for a start, and for an end after a fault
STUCK = 60  # seconds without a new checkpoint: an epoch took 5 to 12 s, and 33 s on a busy machine
# MiB that a process may grow after its first minute. In four more minutes, a rank of 240 MiB grew
# by 0.4. A leak of 250 bytes in each step of an hour would be above the limit.
LIMIT = 20
TRIAL = 600  # seconds; in a shorter run, every attempt may be too short to measure its growth


@dataclass
class Attempt:
    """The job from one start to its end, whether by itself or by a fault."""

    launcher: str
    start: str  # the newest checkpoint at the start
    code: int = 0
    training: float = 0  # seconds from the start until training went on
    trained: float = 0  # seconds from then until the end, or until the fault that ended the job
    ended: float | None = None  # seconds from that fault until the end
    faults: list[str] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)  # MiB, of each process
    growths: dict[str, float | None] = field(default_factory=dict)  # None: it was too short

    def __str__(self) -> str:
        end = f"exit code {self.code}"
        end += "" if self.ended is None else f" after {self.ended:.1f} s"
        begin = f"{self.launcher} | from {self.start or 'scratch'} in {self.training:.1f} s"
        return f"{begin} | {self.trained:.0f} s | {', '.join(self.faults) or 'no fault'} | {end}"


Attempts = list[Attempt]
PAUSE = "pause of a rank"
FAULTS = ("SIGKILL to a rank", "SIGKILL to all ranks", "SIGTERM to the launcher", "Ctrl-C", PAUSE)


def inject(fault: str, running: Running, chance: Random) -> None:
    if fault == "SIGTERM to the launcher":
        running.process.terminate()
    elif fault == "Ctrl-C":
        os.killpg(running.process.pid, signal.SIGINT)
    elif fault == "SIGKILL to all ranks":
        for rank in ranks(running):
            rank.kill()
    elif fault == "SIGKILL to a rank":
        chance.choice(ranks(running)).kill()
    else:
        rank = chance.choice(ranks(running))
        rank.suspend()
        time.sleep(chance.uniform(1, 5))
        rank.resume()


def run_once(args: argparse.Namespace, folder: Path, number: int, every: float) -> Attempt:
    """Start the job, let faults happen about every `every` seconds, and return how it went."""
    home = folder / CHECKPOINTS
    job: list[str | Path] = [SCRIPTS / "char_gpt.py", "--epochs", str(args.epochs)]
    job += ["--run-dir", CHECKPOINTS, *args.flags]
    command = [sys.executable, *job, "--nproc", "2"] if number % 2 else torchrun(2, *job)
    attempt = Attempt(LAUNCHERS[number % 2], max(intact(home), default=""))
    begun = time.monotonic()
    with Running(*command, cwd=folder) as running:
        running.wait_for("epochs are done", DEADLINE)
        check_start(attempt.start, (home / "log.txt").read_text())
        training, memory = time.monotonic(), Memory(running, last=f"epoch {args.epochs} |")
        chance = Random(f"{args.seed} {number}")
        fault, before = disturb(memory, attempt.faults, home, chance, every)
        struck = time.monotonic()
        result = running.wait(DEADLINE)
        while running.processes() and time.monotonic() < struck + DEADLINE:
            time.sleep(0.1)  # of --nproc, ranks may outlive what has started them by seconds
    if fault and result.code:  # on leaving the `with`, no process was left
        attempt.faults.append(fault)
        attempt.ended = time.monotonic() - struck
    attempt.code, attempt.training = result.code, training - begun
    attempt.trained = struck - training
    attempt.peaks = {name: max(mib for _, mib in own) for name, own in memory.samples.items()}
    attempt.growths = {name: growth(own) for name, own in memory.samples.items()}
    check_end(result, fault, before, home)
    return attempt


def disturb(
    memory: Memory, pauses: list[str], home: Path, chance: Random, every: float
) -> tuple[str, set[str]]:
    """Let the job train until a fault is to end it; return the fault and the checkpoints by then.

    Return no fault if the job ends by itself. The pauses before are added to `pauses`.
    """
    while train(memory, home, every * chance.uniform(0.5, 1.5)):
        memory.watch(every * chance.uniform(0, 0.1))  # so that a fault falls anywhere in an epoch
        fault, before = chance.choice(FAULTS), intact(home)
        with suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError):  # just ended
            inject(fault, memory.running, chance)
            if fault == PAUSE:
                pauses.append(fault)
        if fault != PAUSE:
            return fault, before
    return "", set()


def train(memory: Memory, home: Path, seconds: float) -> bool:
    """Let the job train for `seconds` and on to its next checkpoint; return whether it still runs.

    Waiting for that checkpoint means that the next fault cannot hide a hang.
    """
    newest = checkpoint.numbered(home)[-1:]
    begun = since = time.monotonic()
    while memory.watch(SAMPLE):
        now, found = time.monotonic(), checkpoint.numbered(home)[-1:]
        if found != newest:
            if now > begun + seconds:
                return True
            newest, since = found, now
        elif now > since + STUCK:
            raise Wrong(f"no new checkpoint for {STUCK} s\n{memory.running.text()}")
    return False


def check_start(start: str, log: str) -> None:
    """Raise Wrong unless the job says in its log that it began with the checkpoint `start`."""
    begins = re.findall(r"(?:loaded|no checkpoint in) (\S+):", log)
    if not begins or Path(begins[-1]) != Path(CHECKPOINTS, start):
        raise Wrong(f"the job did not begin with {start or 'no checkpoint'}\n{log}")


def check_end(ended: Result, fault: str, before: set[str], home: Path) -> None:
    """Raise Wrong if the end does not fit the fault, or a checkpoint is lost or damaged."""
    after = intact(home)
    check_no_crash(ended)
    check_kept(before, after)
    if damaged := {path.name for path in checkpoint.numbered(home)} - after:
        raise Wrong(f"damaged: {', '.join(sorted(damaged))}")
    if ended.code and not fault:
        raise Wrong(f"no fault, but exit code {ended.code}\n{ended.stderr}")
    # After the last checkpoint, a fault may come too late to change the exit code.
    if fault and not ended.code and max(after, default="") not in before:
        raise Wrong(f"the job ignored {fault}\n{ended.stderr}")


def run_all(args: argparse.Namespace, run: str) -> Attempts:
    """Make the attempts that a run still needs to complete, and return all its attempts."""
    folder, limit = args.folder / run, args.faults if run == WITH_FAULTS else 0
    file = folder / "attempts.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    attempts = [Attempt(**json.loads(line)) for line in lines]
    if run == FAULT_FREE and not attempts:
        rmtree(folder, ignore_errors=True)  # it must be a single attempt
    folder.mkdir(parents=True, exist_ok=True)
    while not attempts or attempts[-1].code:
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
        for name, (_, grown) in memories(attempts).items():
            if max(grown, default=0) > LIMIT:
                lines.append(f"{run}: {name} grew by {max(grown):.1f} MiB, more than {LIMIT}")
            if not grown and seconds(attempts) > TRIAL:
                lines.append(f"{run}: the growth of {name} was not measured")
    try:
        step, weights = final(args, WITH_FAULTS)
        check_equal(weights, final(args, FAULT_FREE)[1], f"the weights at the end, step {step}")
    except Wrong as error:
        lines.append(str(error))
    return lines


def memories(attempts: Attempts) -> dict[str, tuple[float, list[float]]]:
    """Return the highest peak of each process, and its growth in each long enough attempt."""
    names = {"launcher", "rank 0", "rank 1"}.union(*(own.peaks for own in attempts))
    found = {}
    for name in sorted(names):
        grown = [mib for own in attempts if (mib := own.growths.get(name)) is not None]
        found[name] = max(own.peaks.get(name, 0) for own in attempts), grown
    return found


def seconds(attempts: Attempts) -> float:
    return sum(attempt.trained for attempt in attempts)


def final(args: argparse.Namespace, run: str) -> tuple[int, Weights]:
    """Return the last step of a run and its weights; raise Wrong if epochs are missing."""
    paths = checkpoint.numbered(args.folder / run / CHECKPOINTS)
    state = checkpoint.read(paths[-1])
    if state["epoch"] != args.epochs:
        raise Wrong(f"{run}: the last checkpoint is of epoch {state['epoch']}, not {args.epochs}")
    weights = {n: value for n, value in state["model"].items() if isinstance(value, torch.Tensor)}
    return state["step"], weights


def report(args: argparse.Namespace, runs: dict[str, Attempts]) -> str:
    """Return the summary as Markdown."""
    attempts = runs[WITH_FAULTS]
    faults = Counter(fault for attempt in attempts for fault in attempt.faults)
    counts = ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items()))
    ended = [attempt.ended for attempt in attempts if attempt.ended is not None] or [0]
    starts = [attempt.training for attempt in attempts]
    minutes = {run: seconds(runs[run]) / 60 for run in runs}
    words = (
        f"{args.epochs} epochs, {final(args, WITH_FAULTS)[0]:,} steps. "
        f"The fault-free run trained for {minutes[FAULT_FREE]:.0f} minutes, and the run with "
        f"faults for {minutes[WITH_FAULTS]:.0f} minutes in {len(attempts)} attempts, with "
        f"{faults.total()} faults: {counts}. Both ended at the same weights, bit for bit. "
        f"The job ended {median(ended):.1f} s after a fault (at most {max(ended):.1f} s), and "
        f"trained {median(starts):.1f} s after a start (at most {max(starts):.1f} s)."
    )
    rows = [["run", "process", "measured attempts", "peak", "growth"]]
    for run, own in runs.items():
        for name, (peak, grown) in memories(own).items():
            most = f"{max(grown):.1f} MiB" if grown else ""
            rows.append([run, name, f"{len(grown)} of {len(own)}", f"{peak:.0f} MiB", most])
    about = f"`{command_line(args)}`\non {machine(['torch'])}"
    return f"{about}\n\n{words}\n\n{aligned(rows)}"


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
    parser.add_argument("--epochs", type=int, default=300, help="of each run (300, an hour)")
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
    """Exit with an error if the folder has runs of other settings."""
    file, settings = args.folder / "settings.txt", f"{command_line(args)} | {code_version()}"
    if file.exists() and (old := file.read_text()) != settings:
        sys.exit(f"error: {args.folder} is of {old}, not of {settings}: give another --folder")
    if (failed := args.folder / FAILED).exists():
        sys.exit(f"error: a run failed before, see {failed}: give another --folder")
    args.folder.mkdir(parents=True, exist_ok=True)
    file.write_text(settings)


def main() -> None:
    args = parse()
    check_settings(args)
    # A shell's background job would leave Ctrl-C ignored, in the job as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left
    try:
        runs = {run: run_all(args, run) for run in (FAULT_FREE, WITH_FAULTS)}
    except Exception as error:  # noqa: BLE001 - whatever it is, running again must not make it good
        (args.folder / FAILED).write_text(traceback.format_exc())
        sys.exit(f"WRONG: {error} (see {args.folder / FAILED})")
    if wrong := problems(args, runs):
        sys.exit("\n".join(f"WRONG: {line}" for line in wrong))
    print(f"\n{report(args, runs)}")
    if args.markdown:
        put_between(args.markdown, *MARKS, report(args, runs))


if __name__ == "__main__":
    main()
