"""Run the reference job with random faults, and check that it always ends right.

.venv/bin/python drill/drill.py --rounds 20 --seed 7 [--jobs 2] [--only 12]

A round starts scripts/train_reference.py on two ranks (train_from_yaml.py for mp.spawn: the same
training), injects a fault at a random moment, and waits for the end. The job must not hang, leave a
process behind or lose a checkpoint. If it fails, its error must name the cause, and the same
command must then resume from the newest intact checkpoint. At the end, the weights must equal those
of a run without a fault, bit for bit.
"""

import itertools
import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # harness, tables

from faults import small_disk  # noqa: E402
from launchers import slurm_host  # noqa: E402
from plan import FAULTS, Plan, draw  # noqa: E402
from rounds import RESUMED, STARTED_OVER, TOO_LATE, WENT_ON, WRONG, Job, RoundResult  # noqa: E402
from tables import count, grid  # noqa: E402

OUTCOMES = WENT_ON, RESUMED, STARTED_OVER, TOO_LATE


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how many (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults (0)")
    parser.add_argument("--only", type=int, metavar="N", help="run round N only")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at a time (1)")
    args = parser.parse_args()
    # A shell's background job ignores Ctrl-C, and the drill's job would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no disk stays mounted
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        rounds = run_all(args, Path(folder))
    print("", report(rounds), sep="\n")
    sys.exit(not rounds or any(result.outcome == WRONG for result in rounds))


def run_all(args: Namespace, folder: Path) -> list[RoundResult]:
    plans, rounds = choose(args, folder), []
    job = Job(folder)
    job.run_fault_free(sorted({plan.launcher for plan in plans}))
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            for result in pool.map(job.run_round, plans):
                print(result, flush=True)
                rounds.append(result)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            job.stop()
            raise
    return rounds


def choose(args: Namespace, folder: Path) -> list[Plan]:
    """Return the rounds that this machine can run. A number is the same round on every machine."""
    plans: list[Plan] = []
    for number in itertools.count(1) if args.only is None else [args.only]:
        plan = draw(args.seed, number)
        try:
            if plan.launcher == "srun":
                slurm_host()
            if plan.fault == "full disk":
                with small_disk(plan.launcher, folder / "disk"):
                    pass
            plans.append(plan)
        except OSError as error:
            print(f"round {number} is left out: {error}", flush=True)
        if len(plans) >= args.rounds:
            break
    return plans


def report(rounds: Sequence[RoundResult]) -> str:
    """Return the counts of the rounds, and a Markdown table with a row per fault.

    A cost is a median and a maximum, of the rounds that have one.
    """
    rows = [["fault", "rounds", *OUTCOMES, "job ended after", "steps lost"]]
    for fault in FAULTS:
        own = [result for result in rounds if result.plan.fault == fault]
        counts = Counter(result.outcome for result in own)
        numbers = len(own), *(counts[outcome] for outcome in OUTCOMES)
        ended = median_and_maximum([result.ended for result in own], ".1f", " s")
        steps = median_and_maximum([result.steps for result in own], ".0f")
        if own:
            rows.append([fault, *map(str, numbers), ended, steps])
    outcomes = f"{len(rounds)} rounds: {count(result.outcome for result in rounds)}."
    launchers = f"By launcher: {count(result.plan.launch for result in rounds)}."
    return f"{outcomes}\n\n{launchers}\n\n{grid(rows)}"


def median_and_maximum(values: Sequence[float | None], digits: str, unit: str = "") -> str:
    present = [value for value in values if value is not None]
    return f"{median(present):{digits}} / {max(present):{digits}}{unit}" if present else ""


if __name__ == "__main__":
    main()
