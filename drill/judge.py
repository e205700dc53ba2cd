"""Check that a round ended right: no checkpoint lost, the cause reported, the weights equal."""

import re
import signal
from collections.abc import Set

import torch
from harness import Result
from plan import DAMAGES, KEEP, STEPS, Plan

from ddp_ref.training import checkpoint

Weights = dict[str, torch.Tensor]
# What the output of a rank or its launcher must match.
CAUSES = {
    "kill": "SIGKILL|Killed|exitcode: -9",
    "stop": "[Tt]imed out|timeout after|did not (arrive|open the group)|one stopped answering"
    "|the master does not answer|cannot reach the master",
    "pause": "(?!)",  # matches nothing: the job must not fail
    "interrupt": "SIGINT|nterrupt|sending Ctrl-C|exitcode: -2",
    # After any failure, torchrun ends the other ranks with "closing signal SIGTERM".
    "terminate": "ended by a signal at step|(?<!closing signal )(?<!via )SIGTERM|Terminated"
    "|got signal: 15|exitcode: -15",
    "exception": "RuntimeError: the drill's own on rank",
    "full disk": "No space left on device",
}
# When torchrun restarts a job, it names the rank that seems to have failed first. That need not be
# the rank that was hit: torchrun notices a kill some time later, when another rank may already have
# raised an error because its peer was gone.
RESTARTED = r"failed \(exitcode: -?\d+\) local_rank: \d"
SIGTERM_CODE = 128 + signal.SIGTERM  # the job's exit code after it has saved
CRASH = (
    "terminate called|Fatal Python error|Segmentation fault|SIGSEGV|SIGABRT|core dumped"
    r"|tasks? \S+: Aborted|Bus error|SIGBUS|Illegal instruction|SIGILL"
    r"|(free|malloc)\(\): |double free"
)
LOADED = r"(step_\d+\.pt): epoch "  # in the log line of Handler.load


class Wrong(AssertionError):
    """The round did not end right. The errors of the harness are AssertionErrors, too."""


def check_kept(before: Set[str], after: Set[str]) -> None:
    """Check that no checkpoint is lost, except those that newer ones have replaced."""
    newest = sorted(before | after)[-KEEP:]
    if lost := set(newest) - after:
        raise Wrong(f"lost {', '.join(sorted(lost))}, left are {sorted(after)}")


def due_checkpoints(plan: Plan) -> set[str]:
    """Return the checkpoints that must exist when the rank has reached its place."""
    epochs = range(1, plan.epochs_saved + 1)[-KEEP:]
    return {checkpoint.NAME.format(epoch * STEPS) for epoch in epochs}


def check_output(plan: Plan, broken: Result, intact: Set[str], hit: bool) -> None:
    """Check that the output names the cause, that its claims are true, and that nothing crashed.

    Args:
        plan: The round.
        broken: The job that the fault hit.
        intact: The checkpoints that can be read after the job.
        hit: Whether the fault hit the training. If not, the job may succeed without a word.
    """
    text = broken.stderr + broken.stdout
    check_no_crash(broken)
    cause = CAUSES["kill" if plan.fault in DAMAGES else plan.fault]
    if plan.restarts and broken.code == 0:
        cause = f"{cause}|{RESTARTED}"
    if plan.must_save:
        cause = "ended by a signal at step"
    if (broken.code or (hit and plan.must_show)) and not re.search(cause, text):
        raise Wrong(f"exit code {broken.code} without a clear error\n{text}")
    if plan.must_save and plan.launcher != "torchrun" and broken.code != SIGTERM_CODE:
        raise Wrong(f"exit code {broken.code}, not {SIGTERM_CODE}, after a signal\n{text}")
    steps = re.findall(r"ended by a signal at step (\d+)", text)
    check_kept({checkpoint.NAME.format(int(step)) for step in steps}, intact)


def check_restart(broken: Result, before: Set[str]) -> None:
    """Check that a job that torchrun restarted has loaded its newest checkpoint."""
    loaded = max(re.findall(LOADED, broken.stderr), default="")
    if before and loaded < max(before) and re.search(RESTARTED, broken.stderr):
        raise Wrong(f"restarted by torchrun without loading {max(before)}\n{broken.stderr}")


def check_no_crash(ended: Result) -> None:
    """Check that no process has crashed, such as by a segmentation fault."""
    text = ended.stderr + ended.stdout
    if re.search(CRASH, text):
        raise Wrong(f"exit code {ended.code}, but something has crashed\n{text}")


def check_equal(weights: Weights, expected: Weights, what: str) -> None:
    """Check that the weights are equal, bit for bit. `what` names them in the error."""
    same = weights.keys() == expected.keys()
    if not same or not all(_same_bits(weights[name], expected[name]) for name in expected):
        raise Wrong(f"{what}: not equal to those of the fault-free run")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes: torch.equal takes -0.0 for 0.0, and a float32 for the same float64."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
