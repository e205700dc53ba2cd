"""Train scripts/char_gpt.py for an hour with a fault about every two minutes, on two ranks.

.venv/bin/python drill/soak.py --seed 1 [--epochs 300] [--markdown docs/fault-drill.md]

One run is unbroken. The other is struck by a random fault again and again, and is started again
with the same flags, under torchrun and with --nproc in turn. Both must end at the same weights, bit
for bit, and no process may grow or stay behind. Both runs are kept in --folder. After an
interruption, run the same line again: the unbroken run starts over unless it was complete, and the
other one goes on. Flags of char_gpt.py may follow after "--".
"""

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
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
from harness import SCRIPTS, Running, torchrun  # noqa: E402
from judge import Weights, Wrong, check_equal, check_kept, check_no_crash  # noqa: E402
from memory import Memory, growth, ranks  # noqa: E402
from page import around_marks, machine, put_between  # noqa: E402
from report import aligned  # noqa: E402
from rounds import intact  # noqa: E402
from saved import package_hash  # noqa: E402

from ddp_ref.training import checkpoint  # noqa: E402

MARKS = "<!-- begin of what the soak has written -->", "<!-- end of the soak -->"
UNBROKEN, BROKEN, CHECKPOINTS = "unbroken", "broken", "run"  # folders, the last one in the others
FAILED = "wrong.txt"
LAUNCHERS = "torchrun", "--nproc"
DEADLINE = 120  # seconds for a start, for an end after a fault, and for a step after a pause
# MiB that a process may grow after its first minute. In four more minutes, a rank of 240 MiB grew
# by 0.4. A leak of 250 bytes in each step of an hour would be above the limit.
LIMIT = 20


@dataclass
class Life:
    """The job from one start to its end, whether by itself or by a fault."""

    launcher: str
    start: str  # the newest checkpoint at the start
    code: int = 0
    training: float = 0  # seconds from the start until training went on
    trained: float = 0  # seconds from then until the end, or until the fault that ended the job
    ended: float | None = None  # seconds from that fault until the end
    faults: list[str] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)  # MiB, of each process
    growths: dict[str, float | None] = field(default_factory=dict)  # None: it lived too briefly

    def __str__(self) -> str:
        end = f"exit code {self.code}"
        end += "" if self.ended is None else f" after {self.ended:.1f} s"
        begin = f"{self.launcher} | from {self.start or 'scratch'} in {self.training:.1f} s"
        return f"{begin} | {self.trained:.0f} s | {', '.join(self.faults) or 'no fault'} | {end}"


PAUSE = "pause of a rank"
FAULTS = ("SIGKILL to a rank", "SIGKILL to all ranks", "SIGTERM to the launcher", "Ctrl-C", PAUSE)


def inject(fault: str, running: Running, chance: Random) -> None:
    rank = chance.choice(ranks(running))
    if fault == "SIGKILL to a rank":
        rank.kill()
    elif fault == "SIGKILL to all ranks":
        for each in ranks(running):
            each.kill()
    elif fault == "SIGTERM to the launcher":
        running.process.terminate()
    elif fault == "Ctrl-C":
        os.killpg(running.process.pid, signal.SIGINT)
    else:
        rank.suspend()
        time.sleep(chance.uniform(1, 5))
        rank.resume()


def live(args: argparse.Namespace, folder: Path, number: int, every: float) -> Life:
    """Start the job, strike about every `every` seconds until it ends, and return how it went."""
    job: list[str | Path] = [SCRIPTS / "char_gpt.py", "--epochs", str(args.epochs)]
    job += ["--run-dir", CHECKPOINTS, *args.flags]
    command = [sys.executable, *job, "--nproc", "2"] if number % 2 else torchrun(2, *job)
    life = Life(LAUNCHERS[number % 2], max(intact(folder / CHECKPOINTS), default=""))
    begun = time.monotonic()
    with Running(*command, cwd=folder) as running:
        running.wait_for("epochs are done", DEADLINE)
        training, memory = time.monotonic(), Memory(running, last=f"epoch {args.epochs} |")
        before = strike(memory, life.faults, folder, Random(f"{args.seed} {number}"), every)
        struck = time.monotonic()
        result = running.wait(DEADLINE)
        while running.processes() and time.monotonic() < struck + DEADLINE:
            time.sleep(0.1)  # of --nproc, ranks may outlive what has started them by seconds
    if before is not None:  # on leaving the `with`, no process was left
        life.ended = time.monotonic() - struck
    life.code, life.training, life.trained = result.code, training - begun, struck - training
    life.peaks = {name: max(mib for _, mib in own) for name, own in memory.samples.items()}
    life.growths = {name: growth(own) for name, own in memory.samples.items()}
    check_no_crash(result)
    check_kept(before or set(), intact(folder / CHECKPOINTS))
    if before is None and result.code:
        raise Wrong(f"no fault, but {life}\n{result.stderr}")
    return life


def strike(
    memory: Memory, faults: list[str], folder: Path, chance: Random, every: float
) -> set[str] | None:
    """Let the job train until a fault ends it; return the checkpoints that it had by then.

    Return None if it ends by itself.
    """
    while memory.watch(every * chance.uniform(0.5, 1.5)):
        faults.append(chance.choice(FAULTS))
        before = intact(folder / CHECKPOINTS)
        with suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError):  # just ended
            inject(faults[-1], memory.running, chance)
        if faults[-1] != PAUSE:
            return before
        deadline = time.monotonic() + DEADLINE
        while memory.watch(1) and intact(folder / CHECKPOINTS) == before:
            if time.monotonic() > deadline:
                raise Wrong(f"no checkpoint within {DEADLINE} s after a pause")
    return None


def play(args: argparse.Namespace, half: str) -> list[Life]:
    """Play what is missing of a run, from one start to the next, and return all its lives."""
    folder, limit = args.folder / half, args.faults if half == BROKEN else 0
    file = folder / "lives.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    lives = [Life(**json.loads(line)) for line in lines]
    if half == UNBROKEN and not lives:
        rmtree(folder, ignore_errors=True)  # it is to be one lifetime
    folder.mkdir(parents=True, exist_ok=True)
    while not lives or lives[-1].code:
        enough = sum(len(life.faults) for life in lives) >= limit
        life = live(args, folder, len(lives), math.inf if enough else args.every)
        lives.append(life)
        with file.open("a") as lasting:
            lasting.write(json.dumps(asdict(life)) + "\n")
        print(f"{half} {len(lives)} | {life}", flush=True)
        if len(lives) > 3 and lives[-4].start == life.start:
            raise Wrong(f"four starts from {life.start or 'scratch'}: --every is below an epoch")
    return lives


def problems(folder: Path, halves: dict[str, list[Life]]) -> list[str]:
    """Return a line for each thing that is wrong with the two runs."""
    lines = [
        f"{half} {number}: {name} grew by {mib:.1f} MiB, more than {LIMIT}"
        for half, lives in halves.items()
        for number, life in enumerate(lives, start=1)
        for name, mib in life.growths.items()
        if mib is not None and mib > LIMIT
    ]
    try:
        step, weights = final(folder / BROKEN)
        check_equal(weights, final(folder / UNBROKEN)[1], f"the weights at the end, step {step}")
    except Wrong as error:
        lines.append(str(error))
    return lines


def final(folder: Path) -> tuple[int, Weights]:
    """Return the last step and its weights."""
    state = checkpoint.read(checkpoint.numbered(folder / CHECKPOINTS)[-1])
    weights = {n: value for n, value in state["model"].items() if isinstance(value, torch.Tensor)}
    return state["step"], weights


def report(args: argparse.Namespace, halves: dict[str, list[Life]]) -> str:
    """Return the summary as Markdown."""
    lives = halves[BROKEN]
    faults = Counter(fault for life in lives for fault in life.faults)
    counts = ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items()))
    ended = [life.ended for life in lives if life.ended is not None] or [0]
    starts = [life.training for life in lives]
    minutes = {half: sum(life.trained for life in halves[half]) / 60 for half in halves}
    words = (
        f"{args.epochs} epochs, {final(args.folder / BROKEN)[0]:,} steps. "
        f"The unbroken run trained for {minutes[UNBROKEN]:.0f} minutes, and the other one for "
        f"{minutes[BROKEN]:.0f} minutes in {len(lives)} starts, with {faults.total()} faults: "
        f"{counts}. Both ended at the same weights, bit for bit. "
        f"The job ended {median(ended):.1f} s after a fault (at most {max(ended):.1f} s), and "
        f"trained {median(starts):.1f} s after a start (at most {max(starts):.1f} s)."
    )
    rows = [["run", "process", "starts", "peak", "growth"]]
    for half, own in halves.items():
        for name in own[0].peaks:
            peak = max(life.peaks[name] for life in own if name in life.peaks)
            grown = [mib for life in own if (mib := life.growths.get(name)) is not None]
            most = f"{max(grown):.1f} MiB" if grown else ""
            rows.append([half, name, str(len(own)), f"{peak:.0f} MiB", most])
    about = f"`{command_line(args)}`\non {machine(['torch'])}"
    return f"{about}\n\n{words}\n\n{aligned(rows)}"


def command_line(args: argparse.Namespace) -> str:
    parts = [".venv/bin/python", "drill/soak.py", "--seed", str(args.seed)]
    parts += ["--epochs", str(args.epochs), "--every", f"{args.every:g}"]
    return shlex.join(parts + (["--", *args.flags] if args.flags else []))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=300, help="of each run (300, an hour)")
    parser.add_argument("--every", type=float, default=120, help="seconds between faults (120)")
    parser.add_argument("--faults", type=float, default=math.inf, help="at most (no limit)")
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
    try:  # now, and not after two hours
        if args.markdown:
            around_marks(args.markdown, *MARKS)
    except (OSError, ValueError) as error:
        parser.error(f"--markdown: {error}")
    return args


def check_settings(args: argparse.Namespace) -> None:
    """Exit with an error if the folder has runs of other settings."""
    file, settings = args.folder / "settings.txt", f"{command_line(args)} | {package_hash()}"
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
        halves = {half: play(args, half) for half in (UNBROKEN, BROKEN)}
    except AssertionError as error:  # Wrong, or one of harness's own
        (args.folder / FAILED).write_text(str(error))  # another sitting must not make it good
        sys.exit(f"WRONG: {error}")
    if wrong := problems(args.folder, halves):
        sys.exit("\n".join(f"WRONG: {line}" for line in wrong))
    print(f"\n{report(args, halves)}")
    if args.markdown:
        put_between(args.markdown, *MARKS, report(args, halves))


if __name__ == "__main__":
    main()
