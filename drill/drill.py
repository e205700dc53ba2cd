"""Run the reference job with random faults, and check that it always ends right.

.venv/bin/python drill/drill.py --rounds 20 --seed 7 [--launchers spawn torchrun srun] [--only 12]

A round starts scripts/train_reference.py on two ranks, injects a fault at a random moment, and
waits for the end. The job must not hang, leave a process behind or lose a checkpoint. If it fails,
its error must name the cause, and the same command must then resume from the newest intact
checkpoint. At the end, the weights must equal those of a run without a fault, bit for bit.

With --save FILE, each round is added to FILE, and a round that FILE has is not run again. So you
can run the same command again after an interruption, or add rounds with another --seed.
"""

import argparse
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # harness.py and page.py

import saved  # noqa: E402
from faults import why_no_small_disk  # noqa: E402
from launchers import SCRIPT, why_no_slurm  # noqa: E402
from page import require_marks  # noqa: E402
from plan import FAULTS, LAUNCHERS, Pairs, Plan, draw, draw_possible  # noqa: E402
from report import MARKS, failure, summary, table, write_markdown  # noqa: E402
from rounds import WRONG, Job, RoundResult  # noqa: E402


def main() -> None:
    args = parse()
    version = saved.code_version()
    rounds = saved.load(args.save, version) if args.save else []
    # A shell's background job ignores Ctrl-C, and the drill's job would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no disk stays mounted
    with tempfile.TemporaryDirectory(prefix="drill-") as name:
        folder = Path(name)
        done = {(result.command, result.plan.number) for result in rounds}
        plans = [p for p in choose(args, folder) if (command(args), p.number) not in done]
        if args.plan:
            print(*(f"round {plan.number} | {plan}" for plan in plans), sep="\n")
            return
        interrupted = False
        try:
            for result in run_all(Job(args.script.resolve(), folder), plans, args.jobs):
                rounds.append(replace(result, command=command(args), jobs=args.jobs))
                show(rounds[-1])
                if args.save:
                    saved.add(args.save, rounds[-1], version)
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted: the table counts the rounds so far")
    print("", f"{table(rounds)}\n", summary(rounds), *commands(args, rounds), sep="\n")
    wrong = [result for result in rounds if result.outcome == WRONG]
    for result in wrong:
        print(f"{WRONG}: {repeat_command(result)}")
    if args.markdown and not interrupted:
        write_markdown(args.markdown, rounds, commands(args, rounds))
    sys.exit(130 if interrupted else bool(wrong))


def show(result: RoundResult) -> None:
    """Print how a round ended."""
    print(result, flush=True)
    if result.outcome == WRONG:
        print(f"{failure(result)}\n    repeat it: {repeat_command(result)}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="how many (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults (0)")
    parser.add_argument("--only", type=int, metavar="N", help="run round N only")
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--jobs", type=int, default=1, help="rounds at a time (1)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="add the rounds to this file")
    parser.add_argument("--plan", action="store_true", help="print the rounds, run none")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the table into this file"
    )
    parser.add_argument("--script", type=Path, default=SCRIPT, help="another script with its flags")
    args = parser.parse_args()
    if args.rounds < 1 or args.jobs < 1:
        parser.error("--rounds and --jobs must be at least 1")
    if args.save and args.only is not None:
        parser.error(f"--only {args.only} repeats a round: leave out --save {args.save}")
    require_marks(parser, args.markdown, MARKS)
    return args


def choose(args: argparse.Namespace, folder: Path) -> list[Plan]:
    """Return the rounds to run. The same number is the same round on every machine."""
    requested = set(product(args.launchers, args.faults))
    possible = filter_possible(requested, folder)
    if args.only is None:
        return list(islice(draw_possible(args.seed, requested, possible), args.rounds))
    plan = draw(args.seed, args.only, requested)
    if plan.pair not in possible:
        sys.exit(f"error: this machine cannot run round {plan.number}: {plan}")
    return [plan]


def filter_possible(requested: Pairs, folder: Path) -> Pairs:
    """Return the pairs that this machine can run, and print why it cannot run the others."""
    pairs = set(requested)
    if any(launcher == "srun" for launcher, _ in requested) and (reason := why_no_slurm()):
        print(f"without srun: {reason}", flush=True)
        pairs = {pair for pair in pairs if pair[0] != "srun"}
    for launcher, fault in sorted(pairs):
        if fault == "full disk" and (reason := why_no_small_disk(launcher, folder / "disk")):
            print(f"without a full disk under {launcher}: {reason}", flush=True)
            pairs.remove((launcher, fault))
    if not pairs:
        sys.exit("error: no round is left that this machine can run")
    return pairs


def run_all(job: Job, plans: Sequence[Plan], at_a_time: int) -> Iterator[RoundResult]:
    """Run the rounds, and yield their results in the order of the plans."""
    if not plans:
        return
    try:
        job.run_fault_free(sorted({plan.launcher for plan in plans}))
    except AssertionError as error:
        sys.exit(f"error: {error}")
    if at_a_time == 1:
        yield from map(job.run_round, plans)
        return
    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            yield from pool.map(job.run_round, plans)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            job.stop()
            raise


def command(args: argparse.Namespace) -> str:
    """Return the command that draws these rounds again, without their number.

    It leaves out --jobs, because a round is the same however many run at a time.
    """
    parts = [".venv/bin/python", "drill/drill.py", "--seed", str(args.seed)]
    if args.launchers != LAUNCHERS:
        parts += ["--launchers", *args.launchers]
    if args.faults != FAULTS:
        parts += ["--faults", *args.faults]
    if args.script != SCRIPT:
        parts += ["--script", str(args.script)]
    return shlex.join(parts)


def commands(args: argparse.Namespace, rounds: Sequence[RoundResult]) -> list[str]:
    """Return the commands that run these rounds again, one for each seed and --jobs."""
    if args.only is not None:
        return [f"{command(args)} --only {args.only}"]
    counts = Counter((result.command, result.jobs) for result in rounds)
    return [f"{line} --rounds {n} --jobs {jobs}" for (line, jobs), n in counts.items()]


def repeat_command(result: RoundResult) -> str:
    """Return the command that repeats a round."""
    return f"{result.command} --only {result.plan.number}"


if __name__ == "__main__":
    main()
