"""Let jobs hang on purpose, and check that scripts/find_hang.py names the right rank.

python drill/hangs.py [--rounds 1] [--only frozen_read straggler]

A round starts drill/hang_job.py, waits until it hangs, and looks at it twice: at its processes, and
at the flight recorder dumps that its ranks then write. A verdict is right if it accuses the odd
rank and no other, and says where that rank is. If only two ranks are in different collectives,
nobody can say which of them is right, so the verdict must name both. Other rounds look at a job
that is healthy or only slow, and there must be no verdict.
"""

import os
import re
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # harness, page and tables

from harness import Running, free_port, run, torchrun, wait_until  # noqa: E402
from page import machine  # noqa: E402
from tables import grid  # noqa: E402

FIND_HANG, JOB = ROOT / "scripts" / "find_hang.py", ROOT / "drill" / "hang_job.py"
# The cases of hang_job.py, and what the line about the odd rank must quote or say.
ALONE = {
    "frozen_read": "read_text()",
    "endless_loop": "in hang",
    "stopped_process": "os.kill(",
    "stuck_in_kernel": "os.posix_spawn(",
    "blocked_worker": "read_text()",
    "async_wait": "time.sleep(3600)",
    "reduce_sum": "time.sleep(3600)",
    "functional": "time.sleep(3600)",
    "handler_validation": "time.sleep(3600)",
    "handler_on_rank": "time.sleep(3600)",
}
TOGETHER = {
    "other_branch": "dist.barrier()",
    "skipped_call": "dist.barrier()",
    "swallowed_exception": "dist.barrier()",
    "validation_metric": "dist.all_reduce(",
}
HANGS = ALONE | TOGETHER
HEALTHY = [
    "fast_loop",
    "straggler",
    "slow_loader",
    "short_validation",
    "on_rank_work",
    "checkpoint",
    "accumulation",
    "changing_work",
    "late_start",
]
CASES = [*HANGS, *HEALTHY]
LAUNCHERS = "spawn", "torchrun", "run_ranks"
RIGHT, MISSED, WRONG = "right", "missed", "wrong rank accused"
NO_DUMP = {"stopped_process", "stuck_in_kernel"}  # the odd rank cannot write its dump
# The others wait in a group of on_rank's own, in which the odd rank has not recorded anything yet.
OTHER_GROUP = {"handler_on_rank"}
OF_RANK_0 = {"validation_metric", "short_validation"}


class Round(NamedTuple):
    case: str
    launcher: str
    size: int
    odd: int

    def accused(self) -> set[int]:
        """Return the ranks that a verdict must name."""
        if self.case in HEALTHY:
            return set()
        return {0, 1} if self.case in TOGETHER and self.size == 2 else {self.odd}


class Result(NamedTuple):
    round: Round
    live: str
    dumps: str  # "" if the job is healthy
    text: str  # all that find_hang.py has printed

    @property
    def right(self) -> bool:
        return self.live == RIGHT and self.dumps in (RIGHT, "")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each hang (5); 2 if healthy")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
        rounds = [each for each in plan(args.rounds) if each.case in args.only]
        folders = [Path(folder, str(number)) for number in range(len(rounds))]
        with ThreadPoolExecutor(2) as pool:
            for result in pool.map(run_round, rounds, folders):
                results.append(result)
                looks = f"live: {result.live}, dumps: {result.dumps or 'none'}"
                print(result.round, looks, "" if result.right else result.text, flush=True)
    print(f"\non {machine(['torch', 'py-spy'])}\n\n{table(results)}")
    sys.exit(any(not each.right for each in results))


def plan(repeats: int) -> list[Round]:
    """Return the rounds, the same ones each time."""
    rounds = []
    for number, case in enumerate(CASES):
        for nth in range(min(repeats, 2) if case in HEALTHY else repeats):
            chance = Random(f"{case} {nth}")
            size = chance.randint(2, 4)
            odd = 0 if case in OF_RANK_0 else chance.randrange(size)
            rounds.append(Round(case, LAUNCHERS[(number + nth) % len(LAUNCHERS)], size, odd))
    return rounds


def run_round(round_: Round, folder: Path) -> Result:
    (folder / "dumps").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    script: list[str | Path] = [JOB, *map(str, round_)]
    by_torchrun = round_.launcher == "torchrun"
    command = torchrun(round_.size, *script) if by_torchrun else [sys.executable, *script]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env["TORCH_FR_BUFFER_SIZE"] = "2000"
    try:
        with Running(*command, cwd=folder, env=env, fresh=True) as running:
            files = [f"rank_{rank}" for rank in range(round_.size)]
            files += ["worker"] * round_.case.endswith("_worker")

            def arrived() -> bool:
                assert running.process.poll() is None, running.text()
                return all((folder / file).exists() for file in files)

            wait_until(arrived, 180)
            time.sleep(1)
            output = find_hang(folder)
            pids = [f"process {process.pid})" for process in running.processes()]
            jobs = re.split(r"^(?=\S)", output, flags=re.MULTILINE)  # perhaps not only ours
            live = judge(round_, "".join(job for job in jobs if any(pid in job for pid in pids)))
            if round_.case in HEALTHY:
                return Result(round_, live, "", output)
            (folder / "dump_now").touch()
            expected = round_.size - (round_.case in NO_DUMP)
            wait_until(lambda: len([*folder.glob("dumps/*")]) == expected)
            from_dumps = find_hang(folder, "dumps")
            return Result(round_, live, judge_dumps(round_, from_dumps), output + from_dumps)
    except AssertionError as error:
        return Result(round_, MISSED, "" if round_.case in HEALTHY else MISSED, str(error))


def find_hang(folder: Path, *paths: str) -> str:
    """Run find_hang.py and return what it prints."""
    ended = run(sys.executable, FIND_HANG, *paths, cwd=folder, timeout=300)
    output = ended.stdout + ended.stderr
    assert ended.code == (0 if "\n  verdict:" in output else 1), f"{ended.code}\n{output}"
    return output


def judge_dumps(round_: Round, output: str) -> str:
    in_no_dump = round_.case in NO_DUMP | OTHER_GROUP
    if in_no_dump and "verdict:" in output and "\n  verdict:" not in output:
        return RIGHT  # it need not name a rank whose wait is in no dump
    return judge(round_, output, from_dumps=True)


def judge(round_: Round, block: str, from_dumps: bool = False) -> str:
    """Return whether a verdict accuses the right ranks, and whether it knows the line."""
    verdicts = " ".join(re.findall(r"^  verdict: (.*)", block, re.MULTILINE))
    accused = {int(number) for number in re.findall(r"\brank (\d+)", verdicts)}
    if not accused <= round_.accused():
        return WRONG
    known = len(re.findall(r"^  rank \d", block, re.MULTILINE))
    if accused != round_.accused() or (known < round_.size and not from_dumps):
        return MISSED
    # A dump does not know where a rank is that has not made the call.
    if round_.case in HEALTHY or (from_dumps and round_.case in ALONE):
        return RIGHT
    line = re.search(rf"^  rank {round_.odd} .*", block, re.MULTILINE)
    return RIGHT if line and HANGS[round_.case] in line[0] else MISSED


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with a row per kind of job."""
    rows = [["jobs", "cases", "rounds", "right live", "right from dumps", WRONG]]
    names = "one rank stands still", "ranks disagree", "healthy or slow"
    for kind, cases in zip(names, (ALONE, TOGETHER, HEALTHY), strict=True):
        own = [result for result in results if result.round.case in cases]
        live, dumps = [each.live for each in own], [each.dumps for each in own]
        counts = [len({each.round.case for each in own}), len(own), live.count(RIGHT)]
        from_dumps = dumps.count(RIGHT) if any(dumps) else ""
        wrong = live.count(WRONG) + dumps.count(WRONG)
        rows.append([kind, *map(str, [*counts, from_dumps, wrong])])
    return grid(rows)


if __name__ == "__main__":
    main()
