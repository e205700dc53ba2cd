"""Run a round: inject the fault, check what is left, run the command again, compare the weights."""

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from faults import FILLER, LAST, damage, inject, small_disk
from harness import SCRIPTS, Running, wait_until
from judge import (
    Weights,
    Wrong,
    check_broken,
    check_equal,
    check_kept,
    check_no_crash,
    intact_checkpoints,
)
from launchers import CHECKPOINTS, SLURM, job_command, slurm
from moment import REACHED, STEPS_TAKEN, VARIABLE
from plan import DAMAGES, EPOCHS, STEPS, Plan

from ddp_ref import checkpoint

WENT_ON, RESUMED, STARTED_OVER, WRONG = "went on", "resumed", "started over", "WRONG"
TOO_LATE = "too late"  # the fault came after the last checkpoint
# Seconds for a job to end. After a stop, it waits for its timeout, and its launcher for 30 s more.
DEADLINE = 150


@dataclass(frozen=True)
class RoundResult:
    """A round that was run, how it ended, and what the fault has cost."""

    plan: Plan
    outcome: str = WRONG  # or WENT_ON, RESUMED, STARTED_OVER or TOO_LATE
    ended: float | None = None  # seconds from the fault until the job ended; None: it succeeded
    steps: int | None = None  # optimizer steps that the training had to take again
    detail: str = ""  # if it is WRONG: why, with the job's output

    def __str__(self) -> str:
        line = f"round {self.plan.number} | {self.plan} | {self.outcome}"
        line += "" if self.ended is None else f" | ended after {self.ended:.1f} s"
        line += "" if self.steps is None else f" | lost {self.steps} steps"
        return f"{line}\n{self.detail}".rstrip()


class Job:
    """The script that the drill runs, and the weights at the end of a run without a fault."""

    def __init__(self, folder: Path, defect: str = "") -> None:
        self.folder, self.defect = folder, defect
        self.expected: Weights = {}
        self._running: set[Running] = set()
        self._stopped = False

    def run_fault_free(self, launchers: Sequence[str]) -> None:
        """Run the job once under each launcher, and check that all end at the same weights."""
        for launcher in launchers:
            folder = self.folder / launcher
            folder.mkdir()
            with self._start(folder, launcher) as running:
                ended = running.wait(DEADLINE)
            if ended.code:
                raise Wrong(f"the fault-free run failed under {launcher}:\n{ended.stderr}")
            weights = checkpoint.read(folder / CHECKPOINTS / LAST)["model"]
            self.expected = self.expected or weights
            check_equal(weights, self.expected, f"the fault-free run under {launcher}")

    def run_round(self, plan: Plan) -> RoundResult:
        """Run a round in a folder of its own. Errors are not raised, but make the round WRONG."""
        folder = self.folder / f"round{plan.number}"
        folder.mkdir()
        home = folder / CHECKPOINTS
        disk = small_disk(plan.launcher, home) if plan.fault == "full disk" else nullcontext(home)
        try:
            with disk as checkpoints:
                return self._run_round(plan, folder, checkpoints)
        except AssertionError as error:
            return RoundResult(plan, detail=str(error))
        except Exception:  # noqa: BLE001 - whatever it is, report it and run the next round
            return RoundResult(plan, detail=traceback.format_exc())

    def stop(self) -> None:
        """Kill the jobs of the rounds that are running, in any thread, and let none start again."""
        self._stopped = True
        for running in list(self._running):
            running.kill()

    def _run_round(self, plan: Plan, folder: Path, checkpoints: Path) -> RoundResult:
        with self._start(folder, plan.launcher, plan) as running:

            def reached() -> bool:
                assert running.process.poll() is None, f"the rank never got there\n{running.text()}"
                return (folder / REACHED).exists()

            wait_until(reached, DEADLINE)
            before = intact_checkpoints(checkpoints)
            hit = inject(plan, running, folder, checkpoints)
            injected = time.monotonic()
            broken = running.wait(DEADLINE)
        # Leaving the `with` block has checked that no process is left.
        ended = time.monotonic() - injected if broken.code else None
        check_broken(plan, broken, before, intact_checkpoints(checkpoints), hit)
        outcome = WENT_ON
        if broken.code == 0:
            self._check_final(checkpoints)
        if broken.code or plan.fault in DAMAGES:
            outcome = self._resume(plan, folder, checkpoints)
        if not hit and plan.fault not in DAMAGES:
            return RoundResult(plan, TOO_LATE)
        steps = (folder / STEPS_TAKEN).stat().st_size - EPOCHS * STEPS
        return RoundResult(plan, outcome, ended, steps)

    def _resume(self, plan: Plan, folder: Path, checkpoints: Path) -> str:
        """Run the same command again, to the end, and return the outcome of the round."""
        (checkpoints / FILLER).unlink(missing_ok=True)
        must_warn = plan.fault in DAMAGES and damage(plan, checkpoint.numbered(checkpoints)[-1])
        intact = intact_checkpoints(checkpoints)
        with self._start(folder, plan.launcher, plan) as running:  # REACHED exists: no rank waits
            resumed = running.wait(DEADLINE)
        check_no_crash(resumed)
        start = f"{max(intact)}: epoch " if intact else f"no checkpoint in {CHECKPOINTS}"
        text = resumed.stderr + resumed.stdout
        if resumed.code or start not in text:
            said = f"the second run ended with {resumed.code} and had to log {start!r}"
            raise Wrong(f"{said}\n{text}")
        if ("trying the one before it" in text) != must_warn:
            warning = "no warning" if must_warn else "a warning"
            raise Wrong(f"{warning} about a damaged checkpoint\n{text}")
        check_kept(intact, intact_checkpoints(checkpoints))
        self._check_final(checkpoints)
        return RESUMED if intact else STARTED_OVER

    def _check_final(self, checkpoints: Path) -> None:
        weights = checkpoint.read(checkpoints / LAST)["model"]
        check_equal(weights, self.expected, "the weights at the end")

    @contextmanager
    def _start(self, folder: Path, launcher: str, plan: Plan | None = None) -> Iterator[Running]:
        """Start the job. With a plan, a rank waits at its place, or counts its steps."""
        moment = {name: getattr(plan, name, None) for name in ("rank", "place", "nth")}
        name = f"{folder.parent.name}-{folder.name}"  # of the job in Slurm
        script = "train_from_yaml.py" if launcher == "spawn" else "train_reference.py"
        env = {VARIABLE: json.dumps(moment), "DRILL_SCRIPT": str(SCRIPTS / script)}
        command = job_command(launcher, plan.restarts if plan else 0)
        env |= SLURM | {"SLURM_JOB_NAME": name, "DRILL_DEFECT": self.defect}
        try:
            with Running(*command, cwd=folder, env=env) as running:
                self._running.add(running)
                if self._stopped:  # `stop` may have run just before this job was added
                    raise Wrong("the drill was stopped")
                yield running
                self._running.remove(running)
        finally:
            if launcher == "srun":  # killing srun does not end the job in Slurm
                slurm("scancel", f"--name={name}")
