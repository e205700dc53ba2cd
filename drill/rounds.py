"""Play a round: break the job, look at what is left, run the same line again, compare weights."""

import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from faults import FILLER, LAST, damage, slurm, small_disk, strike
from harness import Result, Running
from judge import (
    Weights,
    Wrong,
    check_clear,
    check_equal,
    check_kept,
    check_no_crash,
    check_restart,
    due,
)
from launchers import CHECKPOINTS, command, slurm_environment
from moment import REACHED, STEPS_TAKEN, VARIABLE
from plan import DAMAGES, EPOCHS, STEPS, Plan

from ddp_ref.training import checkpoint

Line = list[str | Path]  # a command
Moment = dict[str, int | str | None]  # the rank None is none
WENT_ON, RESUMED, STARTED_OVER, WRONG = "went on", "resumed", "started over", "WRONG"
TOO_LATE = "ended before the fault"  # so that the round shows nothing
PASSED_OVER = "trying the one before it"  # of a damaged checkpoint
DEADLINE = 150  # seconds: a stopped rank costs patience, and 30 s of its launcher's


@dataclass(frozen=True)
class Cost:
    """What a fault has cost; None where there was no such thing."""

    ended: float | None = None  # seconds from the fault until the broken job had ended
    resumed: float | None = None  # seconds from the second command until its checkpoint was loaded
    steps: int | None = None  # optimizer steps that were lost, so that they were taken again

    def __str__(self) -> str:
        ended = None if self.ended is None else f"ended after {self.ended:.1f} s"
        resumed = None if self.resumed is None else f"resumed after {self.resumed:.1f} s"
        steps = None if self.steps is None else f"lost {self.steps} steps"
        return ", ".join(filter(None, [ended, resumed, steps]))


@dataclass(frozen=True)
class Played:
    """How a round ended: right in one of a few ways, or wrong, with what shows it."""

    plan: Plan
    outcome: str  # WENT_ON, RESUMED, STARTED_OVER, TOO_LATE or WRONG
    seconds: float
    detail: str = ""
    cost: Cost = Cost()
    command: str = ""  # with --only and its number, it repeats the round
    jobs: int = 1  # how many rounds were played at a time
    day: str = ""

    def __str__(self) -> str:
        line = f"round {self.plan.number} | {self.plan} | {self.outcome} | {self.seconds:.0f} s"
        return f"{line} | {self.cost}".removesuffix(" | ")


class Job:
    """The script that is broken, and the weights at which it ends where nothing breaks it."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script, self.folder = script, folder
        self.unbroken: Weights = {}
        self._open: set[Running] = set()
        self._stopped = False

    def run_unbroken(self, launchers: Sequence[str]) -> None:
        """Run it once under each of `launchers`: all must end at the same weights."""
        for launcher in launchers:
            folder = self.folder / launcher
            folder.mkdir()
            ended = self._run(command(launcher), folder, {"rank": None})
            if ended.code:
                raise Wrong(f"the unbroken run failed under {launcher}:\n{ended.stderr}")
            found = _final(folder / CHECKPOINTS)
            self.unbroken = self.unbroken or found
            check_equal(found, self.unbroken, f"the unbroken run under {launcher}")

    def play(self, plan: Plan) -> Played:
        """Play a round in a folder of its own; what goes wrong is in what comes back."""
        begun, detail = time.monotonic(), ""
        folder = self.folder / f"round{plan.number}"
        folder.mkdir()
        home = folder / CHECKPOINTS
        disk = small_disk(plan.launcher, home) if plan.fault == "full disk" else nullcontext(home)
        try:
            with disk as checkpoints, _ended_in_slurm(plan, folder):
                outcome, cost = self._play(plan, folder, checkpoints)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a find: told, and the next
            outcome, cost = WRONG, Cost()
            detail = str(error) if isinstance(error, AssertionError) else _told(error)
        day = str(date.today())
        return Played(plan, outcome, time.monotonic() - begun, detail, cost, day=day)

    def stop(self) -> None:
        """End the rounds that are being played, in whichever threads: none starts a job again."""
        self._stopped = True
        for running in list(self._open):
            running.kill()

    def _play(self, plan: Plan, folder: Path, checkpoints: Path) -> tuple[str, Cost]:
        line = command(plan.launcher, plan.restarts)
        moment: Moment = {"rank": plan.rank, "place": plan.place, "nth": plan.nth}
        broken, ended, hit = self._break(plan, line, folder, moment, checkpoints)
        if broken.code == 0:
            _check_final(checkpoints, self.unbroken, broken)
            if plan.fault not in DAMAGES:  # torchrun may have restarted the job
                return (WENT_ON, Cost(steps=_lost(folder))) if hit else (TOO_LATE, Cost())
        (checkpoints / FILLER).unlink(missing_ok=True)
        warned = plan.fault in DAMAGES and _damage(plan, checkpoints)
        whole = intact(checkpoints)
        start = f"{max(whole)}: epoch " if whole else f"no checkpoint in {CHECKPOINTS}"
        begun = time.monotonic()
        with self._start(line, folder, moment) as running:  # in the same place: it waits no more
            _wait_until(running, lambda: start in running.text())
            loaded = time.monotonic() - begun
            resumed = running.wait(DEADLINE)
        check_no_crash(resumed)
        if resumed.code:
            raise Wrong(f"the same line again failed with {resumed.code}\n{resumed.stderr}")
        if start not in resumed.stderr or (PASSED_OVER in resumed.stderr) != warned:
            raise Wrong(f"it was to begin with {start!r}, warned: {warned}\n{resumed.stderr}")
        check_kept(whole, intact(checkpoints))
        _check_final(checkpoints, self.unbroken, resumed)
        return RESUMED if whole else STARTED_OVER, Cost(ended, loaded, _lost(folder))

    def _break(
        self, plan: Plan, line: Line, folder: Path, moment: Moment, checkpoints: Path
    ) -> tuple[Result, float | None, bool]:
        """Run the job into its fault, and check that no checkpoint was lost.

        Return what it said, how many seconds after the fault it ended, unless it went on, and
        whether the fault hit the training.
        """
        with self._start(line, folder, moment) as running:
            if not _wait_until(running, (folder / REACHED).exists):
                raise Wrong(f"the rank never came to the moment\n{running.text()}")
            before = intact(checkpoints)
            check_kept(due(plan), before)
            hit = strike(plan, running, folder, checkpoints)
            struck = time.monotonic()
            broken = running.wait(DEADLINE)
        # On leaving the `with`, no process was left.
        ended = time.monotonic() - struck if broken.code else None
        after = intact(checkpoints)
        check_kept(before, after)
        check_clear(plan, broken, after, hit)
        if broken.code == 0:
            check_restart(broken, before)
        return broken, ended, hit

    @contextmanager
    def _start(self, line: Line, folder: Path, moment: Moment) -> Iterator[Running]:
        env = {VARIABLE: json.dumps(moment), "DRILL_SCRIPT": str(self.script)}
        env |= slurm_environment() | {"SLURM_JOB_NAME": _job_name(folder)}
        with Running(*line, cwd=folder, env=env) as running:
            self._open.add(running)
            try:
                if self._stopped:  # it may have come too late for `stop` to see it
                    raise Wrong("the drill was stopped")
                yield running
            finally:
                self._open.remove(running)

    def _run(self, line: Line, folder: Path, moment: Moment) -> Result:
        with self._start(line, folder, moment) as running:
            return running.wait(DEADLINE)


def _told(error: Exception) -> str:
    """Return the error in a line, and below it how it came about."""
    return f"{error!r}\n{''.join(traceback.format_exception(error))}"


def _wait_until(running: Running, condition: Callable[[], bool]) -> bool:
    """Return True once `condition` is true, False if the job ends first or time is up."""
    deadline = time.monotonic() + DEADLINE
    while not (met := condition()):
        if running.process.poll() is not None or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return met


def _lost(folder: Path) -> int:
    """Return how many steps the struck rank took again: those above what the training needs."""
    return (folder / STEPS_TAKEN).stat().st_size - EPOCHS * STEPS


@contextmanager
def _ended_in_slurm(plan: Plan, folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        if plan.launcher == "srun":  # the death of srun alone does not tell Slurm
            slurm("scancel", f"--name={_job_name(folder)}")


def _job_name(folder: Path) -> str:
    """Return what Slurm calls the job in `folder`."""
    return f"{folder.parent.name}-{folder.name}"


def intact(folder: Path) -> set[str]:
    """Return the names of the checkpoints that can be read."""
    found = set()
    for path in checkpoint.numbered(folder):
        try:
            checkpoint.read(path)
        except (OSError, checkpoint.DamagedCheckpoint):  # the job may just take it away
            continue
        found.add(path.name)
    return found


def _damage(plan: Plan, folder: Path) -> bool:
    """Damage the newest checkpoint; return whether it is one no more: some bits say nothing."""
    newest = checkpoint.numbered(folder)[-1]
    good = checkpoint.read(newest)["model"]
    damage(plan, newest)
    try:
        check_equal(checkpoint.read(newest)["model"], good, "a damaged checkpoint that can be read")
    except checkpoint.DamagedCheckpoint:
        return True
    return False


def _final(folder: Path) -> Weights:
    try:
        return checkpoint.read(folder / LAST)["model"]
    except (OSError, checkpoint.DamagedCheckpoint) as error:
        raise Wrong(f"exit code 0, but the last checkpoint is missing: {error}") from error


def _check_final(folder: Path, expected: Weights, ended: Result) -> None:
    try:
        check_equal(_final(folder), expected, "the weights at the end")
    except Wrong as error:
        raise Wrong(f"{error}\n{ended.stderr}") from error
