"""Hit scripts/elastic.py with random faults, and compare samples and weights with a plain loop.

python drill/elastic_drill.py --rounds 20

A round starts the real launcher and more workers with `--join`. Faults hit them at random moments,
until the training ends. Every step must have read exactly its batch, no step that is done may be
lost, and all workers must end with the weights of a loop without DDP. The variants of
elastic_job.py take turns.
"""

import importlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]  # datautils, harness

from elastic_job import HALF, OPENING, VARIABLE, VARIANTS  # noqa: E402
from harness import Running, free_port, wait_until  # noqa: E402

import datautils  # noqa: E402

JOB = ROOT / "drill" / "elastic_job.py"
FAULTS = [
    *("kill", "kill rank 0", "kill rank 0 in the opening", "kill all but one"),
    *("kill the coordinator", "stop", "stop rank 0", "join", "step fails", "step fails everywhere"),
]
BATCH, EPOCH = 96, 15
STEPS = 500  # of a round
LIMIT = 120  # seconds for a round
# The most seconds from a death to the next step: TIMEOUT + 2, and if no worker is frozen.
BOUND, BOUND_ALONE = 12.0, 5.0
Weights = dict[str, torch.Tensor]
Times = dict[str, list[float]]  # seconds from a death to the next step, by the kind of death


class Record(NamedTuple):
    """A line of a worker's log."""

    pid: int
    kind: str
    when: float
    group: int
    step: int
    more: list[Any]


class Result(NamedTuple):
    faults: list[str]
    wrong: list[str]
    times: Times


class Round:
    def __init__(self, folder: Path, seed: int, steps: int, pace: float, variant: str) -> None:
        self.folder, self.steps, self.variant = folder, steps, variant
        self.random = Random(f"{seed} {variant}")
        self.port = free_port()
        self.environment = {"ELASTIC_TOKEN": f"secret{seed}", VARIABLE: json.dumps([variant, pace])}
        self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "drill"), str(ROOT)])
        self.launchers: list[Running] = []
        self.workers: dict[int, Running | None] = {}  # that live; those that joined have their own
        self.stopped: set[int] = set()
        self.deaths: list[tuple[float, int, str]] = []

    def run(self, faults: Sequence[str]) -> list[str]:
        """Train while up to five of the faults happen, and return them."""
        happened: list[str] = []
        with ExitStack() as self.stack:
            self.launch(self.random.randint(3, 5))
            printed = self.launchers[0].wait_for("one more: ")
            pids = re.findall(r"\d+", printed.partition("workers:")[2].partition("\n")[0])
            self.workers.update({int(pid): None for pid in pids})
            wait_until(self.rank_0)
            for fault in self.random.sample(faults, min(5, len(faults))):
                time.sleep(self.random.random() * 2)
                if self.over():
                    break
                self.happen(fault)
                happened.append(fault)
            wait_until(lambda: not self.stopped)
            self.launchers[-1].wait(LIMIT)
            self.forget_the_dead()
            opened = {record.pid for record in self.records() if record.kind == "opens"}
            for pid, running in self.workers.items():
                if running and pid in opened:  # others may have come when there was no launcher
                    code = running.wait(20).code
                    assert code == 0, f"exit code {code}\n{running.text()}"
            wait_until(lambda: not [p for each in self.launchers for p in each.processes()], 20)
        for launcher in self.launchers:  # their workers' output is in theirs
            assert "Traceback" not in launcher.text(), launcher.text()
        code = self.launchers[-1].process.returncode
        assert code == 0, f"the launcher's exit code is {code}\n{self.launchers[-1].text()}"
        return happened

    def launch(self, nproc: int) -> None:
        self.launchers.append(self.start("--nproc", str(nproc), "--port", str(self.port)))

    def start(self, *flags: str) -> Running:
        command: list[str | Path] = [sys.executable, JOB, "--steps", str(self.steps), *flags]
        return self.stack.enter_context(Running(*command, cwd=self.folder, env=self.environment))

    def join(self) -> None:
        running = self.start("--join", f"localhost:{self.port}")
        self.workers[running.process.pid] = running

    def over(self) -> bool:
        return (self.folder / "elastic.pt").exists()

    def records(self) -> list[Record]:
        found = []
        for path in self.folder.glob("*.log"):
            for line in path.read_text().split("\n")[:-1]:  # the last one may be incomplete
                kind, when, group, step, *more = json.loads(line)
                found.append(Record(int(path.stem), kind, when, group, step, more))
        return sorted(found, key=lambda record: record.when)

    def rank_0(self) -> int:
        """Return the newest rank 0, or 0 while nobody trains."""
        tries = [r for r in self.records() if r.kind == "try" and r.more[0] == 0]
        return tries[-1].pid if tries else 0

    def forget_the_dead(self) -> None:
        """Forget the workers that have died at a moment that the drill has chosen."""
        for record in self.records():
            if record.kind == "dies":
                self.workers.pop(record.pid, None)

    def holders(self) -> list[int]:
        """Return the workers that run and have the newest state."""
        tries = [record for record in self.records() if record.kind == "try"]
        newest = max((record.group for record in tries), default=0)
        have = {record.pid for record in tries if record.group == newest}
        return [pid for pid in self.workers if pid in have and pid not in self.stopped]

    def victims(self, number: int) -> list[int]:
        """Choose among the workers that run, but leave one that has the newest state."""
        if not (holders := self.holders()):
            return []
        spared = self.random.choice(holders)
        running = [pid for pid in self.workers if pid not in self.stopped and pid != spared]
        return self.random.sample(running, min(number, len(running)))

    def kill(self, pids: Sequence[int]) -> None:
        """Kill workers, and note when: the others must go on soon."""
        for pid in pids:
            beside = "beside a frozen one" if self.stopped else "alone"
            self.deaths.append((time.monotonic(), pid, beside))
            running = self.workers.pop(pid)
            self.signal(pid, signal.SIGKILL)
            if running:
                running.process.wait(20)

    def signal(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended: at a moment, or with the run
            os.kill(pid, number)

    def stop(self, pid: int) -> None:
        """Freeze a worker for some seconds."""
        self.stopped.add(pid)
        self.signal(pid, signal.SIGSTOP)
        Timer(self.random.random() * 7, self.go_on, [pid]).start()

    def go_on(self, pid: int) -> None:
        self.stopped.remove(pid)
        self.signal(pid, signal.SIGCONT)

    def happen(self, fault: str) -> None:
        self.forget_the_dead()
        while len(self.workers) - len(self.stopped) < 3:
            self.join()
        one, holders = self.victims(1), self.holders()
        if fault.endswith("rank 0"):
            one = [pid for pid in [self.rank_0()] if pid in holders and len(holders) > 1]
        running = len(self.workers) - len(self.stopped)
        match fault:
            case "kill" | "kill rank 0":
                self.kill(one)
            case "kill all but one":
                self.kill(self.victims(100))
            # One has a step more than the others, and dies as rank 0 of the next group.
            case "kill rank 0 in the opening" if len(holders) > 1:
                self.order(OPENING)
                self.order(HALF, running - 1)
            case "stop" | "stop rank 0":
                for pid in one:
                    self.stop(pid)
            case "join":
                self.join()
            case "kill the coordinator":  # and start another one at the same port
                self.launchers[-1].process.kill()
                self.launchers[-1].process.wait(20)
                time.sleep(self.random.random())
                self.launch(0)
            case "step fails":
                self.order(HALF)
            case "step fails everywhere":
                self.order(HALF, running)
        # The worker that is to die must not be the last one with the newest state.
        wait_until(lambda: self.over() or not [*self.folder.glob(f"{OPENING}@*")], 30)

    def order(self, moment: str, number: int = 1) -> None:
        """Order faults at a moment, for as many workers."""
        for _ in range(number):
            (self.folder / f"{moment}@{self.random.random()}").touch()

    def check(self, batches: list[list[int]], weights: Weights) -> tuple[list[str], Times]:
        """Compare the logs and the final weights with those of the plain loop."""
        records = self.records()
        wrong = check_steps(records, batches)
        for path in [*self.folder.glob("[0-9]*.pt"), self.folder / "elastic.pt"]:
            loaded = torch.load(path)
            step, own = loaded if isinstance(loaded, list) else (self.steps, loaded)
            if step < self.steps:  # it waited for a group when the others had finished
                continue
            if self.variant == "batch_norm":  # which depends on the number of workers
                if own["3.num_batches_tracked"] != self.steps:
                    wrong.append(f"BatchNorm counts {own['3.num_batches_tracked']} steps")
                continue
            difference = max((own[key] - weights[key]).abs().max().item() for key in weights)
            if not difference < 1e-9:
                wrong.append(f"weights differ by {difference:.1e}")
        times = times_to_go_on(records, self.deaths)
        for kind, seconds in times.items():
            late = max(seconds)
            if late > (BOUND_ALONE if kind == "alone" else BOUND):
                wrong.append(f"{late:.2f} s from a death ({kind}) to the next step")
        return wrong, times


def check_steps(records: Sequence[Record], batches: list[list[int]]) -> list[str]:
    """Return what is wrong with the samples that were read and the steps that were done."""
    wrong: list[str] = []
    tries: dict[tuple[int, int], list[int]] = {}  # by group and step: the samples of all workers
    first: dict[int, int] = {}  # by group: its first step
    best: dict[int, int] = {}  # by group: the most steps that a member of it has done
    for _, kind, _, group, step, more in records:
        if kind == "try":
            tries.setdefault((group, step), []).extend(more[2])
            first[group] = min(step, first.get(group, step))
        elif kind == "opens" and group:  # a worker with the state of a group before
            best[more[0]] = max(step, best.get(more[0], 0))
    commits = {(record.group, record.step) for record in records if record.kind == "commit"}
    for group, step in sorted(commits):
        if sorted(tries[group, step]) != sorted(batches[step]):
            wrong.append(f"step {step} of group {group} has read other samples")
    for group, step in first.items():
        if step < best.get(group, 0):
            wrong.append(f"group {group} begins with step {step}, but {best[group]} were done")
        if step and step - 1 not in {done for earlier, done in commits if earlier < group}:
            wrong.append(f"group {group} begins with step {step}, which nobody had reached")
    if {step for _, step in commits} != set(range(len(batches))):
        wrong.append("a step is missing")
    return wrong


def times_to_go_on(records: Sequence[Record], deaths: Sequence[tuple[float, int, str]]) -> Times:
    """Return the seconds from the death of a group's member to the next step of another group."""
    times: Times = {}
    own = [(record.when, record.pid, "at a moment") for record in records if record.kind == "dies"]
    for when, pid, kind in [*deaths, *own]:
        before = [r for r in records if r.when < when]
        opened = [r.more[0] for r in before if r.kind == "opens" and r.pid == pid]
        current = max((r.group for r in before if r.kind == "commit"), default=0)
        if opened and opened[-1] >= current:  # it was a member
            commits = [r for r in records if r.kind == "commit" and r.when > when]
            later = [r.when for r in commits if r.group > opened[-1] or kind == "at a moment"]
            if later:
                times.setdefault(kind, []).append(min(later) - when)
    return times


def train_plainly(steps: int) -> tuple[list[list[int]], Weights]:
    """Train without DDP and without elastic.py. Return the batches and the weights, in float64."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    data = datautils.MyTrainDataset()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches: list[list[int]] = []
    while len(batches) < steps:
        epoch = torch.Generator().manual_seed(len(batches) // EPOCH)
        order = torch.randperm(len(data), generator=epoch)
        batches += [part.tolist() for part in order.split(BATCH)]
    for step, batch in enumerate(batches[:steps]):
        torch.manual_seed(step)
        noise = 0.05 * torch.randn(BATCH, 64)
        optimizer.zero_grad()
        outputs = model(data.images[batch].double() + noise)
        nn.functional.cross_entropy(outputs, data.digits[batch]).backward()
        optimizer.step()
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)
    return batches[:steps], model.state_dict()


def run_round(
    seed: int,
    plain: tuple[list[list[int]], Weights],
    variant: str,
    faults: Sequence[str] = FAULTS,
    pace: float = 0.01,
) -> Result:
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        this = Round(Path(folder), seed, len(plain[0]), pace, variant)
        try:
            happened = this.run(faults)
        except AssertionError as error:
            return Result([], [str(error)], {})
        finally:
            # Reap what a worker has left that died while another one was forked (warm_start.py).
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess, ChildProcessError):
                    if child.status() == psutil.STATUS_ZOMBIE:
                        os.waitpid(child.pid, os.WNOHANG)
        return Result(happened, *this.check(*plain))


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    warm_start: Any = importlib.import_module("warm_start")  # of the tests: it starts faster
    warm_start.install()
    plain, times, results = train_plainly(STEPS), Times(), list[Result]()
    for seed in range(args.rounds):
        variant = VARIANTS[seed % len(VARIANTS)]
        results.append(result := run_round(seed, plain, variant))
        for kind, values in result.times.items():
            times.setdefault(kind, []).extend(values)
        wrong = [f"\n  WRONG: {line}" for line in result.wrong]
        print(f"{seed} {variant}", *result.faults, *wrong, sep=" | ", flush=True)
    warm_start.uninstall()
    faults = sum(len(result.faults) for result in results)
    bad = sum(bool(result.wrong) for result in results)
    print(f"{len(results)} rounds, {faults} faults, {bad} wrong")
    for kind, values in times.items():
        middle, most = statistics.median(values), sorted(values)[len(values) * 9 // 10]
        print(
            f"from a death ({kind}) to the next step: median {middle:.2f} s, "
            f"9 of 10 within {most:.2f} s, longest {max(values):.2f} s, of {len(values)}"
        )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
