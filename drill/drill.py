"""Break the reference job in random ways, and see that each time it ends right.

.venv/bin/python drill/drill.py --rounds 20 --seed 7 [--launchers spawn torchrun srun] [--only 12]

A round starts scripts/train_reference.py on two ranks, strikes at a moment, and waits for the end:
no hang, no process left, no checkpoint lost, and an error that names its cause, unless it could go
on. Then the same line again must resume from the newest intact checkpoint. Either way the weights
must be those of an unbroken run, bit for bit.

With --save FILE, the rounds of all sittings are kept in FILE, and a round that is there is not
played again: after an interruption, run the same line again, or add rounds with another --seed.
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
from plan import FAULTS, LAUNCHERS, Pairs, Plan, draw, drawn  # noqa: E402
from report import MARKS, costs, summary, table, tail, write_markdown  # noqa: E402
from rounds import WRONG, Job, Played  # noqa: E402


def main() -> None:
    args = parse()
    rounds = saved.load(args.save) if args.save else []
    # A shell's background job would leave Ctrl-C ignored, in the job as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays mounted
    with tempfile.TemporaryDirectory(prefix="drill-") as name:
        folder = Path(name)
        done = {(played.command, played.plan.number) for played in rounds}
        plans = [p for p in choose(args, folder) if (command(args), p.number) not in done]
        if args.plan:
            print(*(f"round {plan.number} | {plan}" for plan in plans), sep="\n")
            return
        interrupted = False
        try:
            for played in play_all(Job(args.script.resolve(), folder), plans, args.jobs):
                rounds.append(replace(played, command=command(args), jobs=args.jobs))
                tell(rounds[-1], args.save)
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted: what follows is of the rounds so far")
    lines = [f"{table(rounds)}\n", f"{costs(rounds)}\n", summary(rounds), *commands(args, rounds)]
    print("", *lines, sep="\n")
    wrong = [played for played in rounds if played.outcome == WRONG]
    for played in wrong:
        print(f"{WRONG}: {again(played)}")
    if args.markdown and not interrupted:
        write_markdown(args.markdown, rounds, commands(args, rounds))
    sys.exit(130 if interrupted else bool(wrong))


def tell(played: Played, file: Path | None) -> None:
    """Print how a round ended, and keep it in `file`, if there is one."""
    print(played, flush=True)
    if played.outcome == WRONG:
        print(f"{tail(played)}\n    repeat it: {again(played)}", flush=True)
    if file:
        saved.add(file, played)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="how many (20)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (0)")
    parser.add_argument("--only", type=int, metavar="N", help="play round N alone")
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--jobs", type=int, default=1, help="rounds at a time (1)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="add the rounds to those there")
    parser.add_argument("--plan", action="store_true", help="print the rounds, play none")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the tables there as well"
    )
    parser.add_argument("--script", type=Path, default=SCRIPT, help="a script with the same flags")
    args = parser.parse_args()
    if args.rounds < 1 or args.jobs < 1:
        parser.error("--rounds and --jobs must be at least 1")
    if args.save and args.only is not None:
        parser.error(f"--only {args.only} repeats a round: leave out --save {args.save}")
    require_marks(parser, args.markdown, MARKS)
    return args


def choose(args: argparse.Namespace, folder: Path) -> list[Plan]:
    """Return the rounds to play: what a number stands for does not depend on the machine."""
    asked = set(product(args.launchers, args.faults))
    here = possible(asked, folder)
    if args.only is None:
        return list(islice(drawn(args.seed, asked, here), args.rounds))
    plan = draw(args.seed, args.only, asked)
    if plan.pair not in here:
        sys.exit(f"error: round {plan.number} is left out here: {plan}")
    return [plan]


def possible(asked: Pairs, folder: Path) -> Pairs:
    """Return the launchers and faults that go together here; say of the others why not."""
    pairs = set(asked)
    if any(launcher == "srun" for launcher, _ in asked) and (reason := why_no_slurm()):
        print(f"left out: srun: {reason}", flush=True)
        pairs = {pair for pair in pairs if pair[0] != "srun"}
    for launcher, fault in sorted(pairs):
        if fault == "full disk" and (reason := why_no_small_disk(launcher, folder / "disk")):
            print(f"left out: full disk under {launcher}: {reason}", flush=True)
            pairs.remove((launcher, fault))
    if not pairs:
        sys.exit("error: nothing is left to play")
    return pairs


def play_all(job: Job, plans: Sequence[Plan], at_a_time: int) -> Iterator[Played]:
    """Yield how each round ended, in their order."""
    if not plans:
        return
    try:
        job.run_unbroken(sorted({plan.launcher for plan in plans}))
    except AssertionError as error:
        sys.exit(f"error: {error}")
    if at_a_time == 1:
        yield from map(job.play, plans)
        return
    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            yield from pool.map(job.play, plans)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            job.stop()
            raise


def command(args: argparse.Namespace) -> str:
    """Return the line that draws these rounds again, but for their number.

    Without --jobs: what a round is does not depend on how many are played at a time.
    """
    parts = [".venv/bin/python", "drill/drill.py", "--seed", str(args.seed)]
    if args.launchers != LAUNCHERS:
        parts += ["--launchers", *args.launchers]
    if args.faults != FAULTS:
        parts += ["--faults", *args.faults]
    if args.script != SCRIPT:
        parts += ["--script", str(args.script)]
    return shlex.join(parts)


def commands(args: argparse.Namespace, rounds: Sequence[Played]) -> list[str]:
    """Return the lines that play these rounds again, one for each seed and --jobs."""
    if args.only is not None:
        return [f"{command(args)} --only {args.only}"]
    counts = Counter((played.command, played.jobs) for played in rounds)
    return [f"{line} --rounds {n} --jobs {jobs}" for (line, jobs), n in counts.items()]


def again(played: Played) -> str:
    """Return the line that repeats a round."""
    return f"{played.command} --only {played.plan.number}"


if __name__ == "__main__":
    main()
