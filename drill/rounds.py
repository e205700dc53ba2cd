"""Run a round: inject the fault, check what is left, run the command again, compare the weights."""

import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from faults import FILLER, LAST, damage, inject, slurm, small_disk
from harness import Result, Running
from judge import (
    Weights,
    Wrong,
    check_equal,
    check_kept,
    check_no_crash,
    check_output,
    check_restart,
    due_checkpoints,
)
from launchers import CHECKPOINTS, job_command, slurm_environment
from moment import REACHED, STEPS_TAKEN, VARIABLE
from plan import DAMAGES, EPOCHS, STEPS, Plan

from ddp_ref.training import checkpoint

Command = list[str | Path]
Moment = dict[str, int | str | None]  # if the rank is None, no rank waits
WENT_ON, RESUMED, STARTED_OVER, WRONG = "went on", "resumed", "started over", "WRONG"
TOO_LATE = "too late"  # the fault came after the last checkpoint
DAMAGE_WARNING = "trying the one before it"  # what Handler.load says of a damaged checkpoint
# Seconds for a job to end. After a stop, it waits for its timeout, and its launcher for 30 s more.
DEADLINE = 150


@dataclass(frozen=True)
class Cost:
    """What a fault has cost. None: it did not happen in this round."""

    ended: float | None = None  # seconds from the fault until the broken job had ended
    resumed: float | None = None  # seconds from the second start until the checkpoint was loaded
    steps: int | None = None  # optimizer steps that the training had to take again

    def __str__(self) -> str:
        ended = None if self.ended is None else f"ended after {self.ended:.1f} s"
        resumed = None if self.resumed is None else f"resumed after {self.resumed:.1f} s"
        steps = None if self.steps is None else f"lost {self.steps} steps"
        return ", ".join(filter(None, [ended, resumed, steps]))


@dataclass(frozen=True)
class RoundResult:
    """A round that was run, and how it ended."""

    plan: Plan
    outcome: str  # WENT_ON, RESUMED, STARTED_OVER, TOO_LATE or WRONG
    seconds: float
    detail: str = ""  # if it is WRONG: a line that says why, and the output
    cost: Cost = Cost()
    command: str = ""  # repeats the round, with --only and its number
    jobs: int = 1  # how many rounds ran at a time
    day: str = ""

    def __str__(self) -> str:
        line = f"round {self.plan.number} | {self.plan} | {self.outcome} | {self.seconds:.0f} s"
        return f"{line} | {self.cost}".removesuffix(" | ")


class Job:
    """The script that the drill runs, and the weights at the end of a run without a fault."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script, self.folder = script, folder
        self.expected: Weights = {}
        self._running: set[Running] = set()
        self._stopped = False

    def run_fault_free(self, launchers: Sequence[str]) -> None:
        """Run the job once under each launcher, and check that all end at the same weights."""
        for launcher in launchers:
            folder = self.folder / launcher
            folder.mkdir()
            with self._start(job_command(launcher), folder, {"rank": None}) as running:
                ended = running.wait(DEADLINE)
            if ended.code:
                raise Wrong(f"the fault-free run failed under {launcher}:\n{ended.stderr}")
            weights = _final_weights(folder / CHECKPOINTS)
            self.expected = self.expected or weights
            check_equal(weights, self.expected, f"the fault-free run under {launcher}")

    def run_round(self, plan: Plan) -> RoundResult:
        """Run a round in a folder of its own. Errors are not raised, but make the round WRONG."""
        begun, detail = time.monotonic(), ""
        folder = self.folder / f"round{plan.number}"
        folder.mkdir()
        home = folder / CHECKPOINTS
        disk = small_disk(plan.launcher, home) if plan.fault == "full disk" else nullcontext(home)
        try:
            with disk as checkpoints, _cancelled_in_slurm(plan, folder):
                outcome, cost = self._run_round(plan, folder, checkpoints)
        except Exception as error:  # noqa: BLE001 - whatever it is, report it and run the next round
            outcome, cost = WRONG, Cost()
            trace = "".join(traceback.format_exception(error))
            detail = str(error) if isinstance(error, AssertionError) else f"{error!r}\n{trace}"
        day = str(date.today())
        return RoundResult(plan, outcome, time.monotonic() - begun, detail, cost, day=day)

    def stop(self) -> None:
        """Kill the jobs of the rounds that are running, in any thread, and let none start again."""
        self._stopped = True
        for running in list(self._running):
            running.kill()

    def _run_round(self, plan: Plan, folder: Path, checkpoints: Path) -> tuple[str, Cost]:
        command = job_command(plan.launcher, plan.restarts)
        moment: Moment = {"rank": plan.rank, "place": plan.place, "nth": plan.nth}
        broken, ended, hit = self._break(plan, command, folder, moment, checkpoints)
        if broken.code == 0:
            _check_final(checkpoints, self.expected, broken)
            if plan.fault not in DAMAGES:
                return (WENT_ON, Cost(steps=_steps_lost(folder))) if hit else (TOO_LATE, Cost())
        (checkpoints / FILLER).unlink(missing_ok=True)
        must_warn = plan.fault in DAMAGES and _damage(plan, checkpoints)
        intact = intact_checkpoints(checkpoints)
        start = f"{max(intact)}: epoch " if intact else f"no checkpoint in {CHECKPOINTS}"
        begun = time.monotonic()
        with self._start(command, folder, moment) as running:  # REACHED exists, so no rank waits
            _wait_until(running, lambda: start in running.text())
            loaded = time.monotonic() - begun
            resumed = running.wait(DEADLINE)
        check_no_crash(resumed)
        if resumed.code:
            raise Wrong(f"the second run failed with {resumed.code}\n{resumed.stderr}")
        if start not in resumed.stderr:
            raise Wrong(f"the second run did not log {start!r}\n{resumed.stderr}")
        if (DAMAGE_WARNING in resumed.stderr) != must_warn:
            warning = "no warning" if must_warn else "a warning"
            raise Wrong(f"{warning} about a damaged checkpoint\n{resumed.stderr}")
        check_kept(intact, intact_checkpoints(checkpoints))
        _check_final(checkpoints, self.expected, resumed)
        if not hit and plan.fault not in DAMAGES:
            return TOO_LATE, Cost()
        return RESUMED if intact else STARTED_OVER, Cost(ended, loaded, _steps_lost(folder))

    def _break(
        self, plan: Plan, command: Command, folder: Path, moment: Moment, checkpoints: Path
    ) -> tuple[Result, float | None, bool]:
        """Run the job, inject the fault, and check what the job left behind.

        Returns:
            The result of the job; how many seconds after the fault it ended, None if it succeeded;
            and whether the fault hit the training.
        """
        with self._start(command, folder, moment) as running:
            if not _wait_until(running, (folder / REACHED).exists):
                raise Wrong(f"the rank never reached its moment\n{running.text()}")
            before = intact_checkpoints(checkpoints)
            check_kept(due_checkpoints(plan), before)
            hit = inject(plan, running, folder, checkpoints)
            injected = time.monotonic()
            broken = running.wait(DEADLINE)
        # Leaving the `with` block has checked that no process is left.
        ended = time.monotonic() - injected if broken.code else None
        after = intact_checkpoints(checkpoints)
        check_kept(before, after)
        check_output(plan, broken, after, hit)
        if broken.code == 0:
            check_restart(broken, before)
        return broken, ended, hit

    @contextmanager
    def _start(self, command: Command, folder: Path, moment: Moment) -> Iterator[Running]:
        env = {VARIABLE: json.dumps(moment), "DRILL_SCRIPT": str(self.script)}
        env |= slurm_environment() | {"SLURM_JOB_NAME": _job_name(folder)}
        with Running(*command, cwd=folder, env=env) as running:
            self._running.add(running)
            try:
                if self._stopped:  # `stop` may have run just before this job was added
                    raise Wrong("the drill was stopped")
                yield running
            finally:
                self._running.remove(running)


def _wait_until(running: Running, condition: Callable[[], bool]) -> bool:
    """Return True once `condition` is true, or False if the job ends first or the time is up."""
    deadline = time.monotonic() + DEADLINE
    while not (met := condition()):
        if running.process.poll() is not None or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return met


def _steps_lost(folder: Path) -> int:
    """Return how many steps the rank has taken more than once."""
    return (folder / STEPS_TAKEN).stat().st_size - EPOCHS * STEPS


@contextmanager
def _cancelled_in_slurm(plan: Plan, folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        if plan.launcher == "srun":  # killing srun does not end the job in Slurm
            slurm("scancel", f"--name={_job_name(folder)}")


def _job_name(folder: Path) -> str:
    """Return the name that the job of a round has in Slurm."""
    return f"{folder.parent.name}-{folder.name}"


def intact_checkpoints(folder: Path) -> set[str]:
    """Return the names of the checkpoints that can be read."""
    intact = set()
    for path in checkpoint.numbered(folder):
        try:
            checkpoint.read(path)
        except (OSError, checkpoint.DamagedCheckpoint):  # the job may just have deleted it
            continue
        intact.add(path.name)
    return intact


def _damage(plan: Plan, folder: Path) -> bool:
    """Damage the newest checkpoint, and return whether that can be noticed.

    Some bits of the file have no meaning. If one of them is flipped, the weights must be unchanged.
    """
    newest = checkpoint.numbered(folder)[-1]
    weights = checkpoint.read(newest)["model"]
    damage(plan, newest)
    try:
        damaged = checkpoint.read(newest)["model"]
    except checkpoint.DamagedCheckpoint:
        return True
    check_equal(damaged, weights, "a damaged checkpoint that can be read")
    return False


def _final_weights(folder: Path) -> Weights:
    try:
        return checkpoint.read(folder / LAST)["model"]
    except (OSError, checkpoint.DamagedCheckpoint) as error:
        raise Wrong(f"exit code 0, but the last checkpoint is missing: {error}") from error


def _check_final(folder: Path, expected: Weights, ended: Result) -> None:
    try:
        check_equal(_final_weights(folder), expected, "the weights at the end")
    except Wrong as error:
        raise Wrong(f"{error}\n{ended.stderr}") from error
