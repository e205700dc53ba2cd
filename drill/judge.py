"""Check that a round ended right: no checkpoint lost, the cause reported, the weights equal."""

import re
import signal
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from harness import Result
from plan import DAMAGES, IN_TRAINING, KEEP, Plan

from ddp_ref import checkpoint

Weights = dict[str, Any]  # of a module: tensors, and its extra state
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


class Wrong(AssertionError):
    """The round did not end right. The errors of the harness are AssertionErrors, too."""


def intact_checkpoints(folder: Path) -> set[str]:
    """Return the names of the checkpoints that can be read."""
    intact = set()
    for path in checkpoint.numbered(folder):
        with suppress(OSError, checkpoint.DamagedCheckpoint):  # the job may just have deleted it
            checkpoint.read(path)
            intact.add(path.name)
    return intact


def check_kept(before: Set[str], after: Set[str]) -> None:
    """Check that no checkpoint is lost, except those that newer ones have replaced."""
    newest = sorted(before | after)[-KEEP:]
    if lost := set(newest) - after:
        raise Wrong(f"lost {', '.join(sorted(lost))}, left are {sorted(after)}")


def check_broken(plan: Plan, broken: Result, before: Set[str], after: Set[str], hit: bool) -> None:
    """Check that the broken job kept its checkpoints, named the cause and told the truth.

    Args:
        plan: The round.
        broken: The job that the fault hit.
        before: The checkpoints before the fault.
        after: The checkpoints that can be read after the job.
        hit: Whether the fault hit the training. If not, the job may succeed without a word.
    """
    check_kept(before, after)
    check_no_crash(broken)
    text = broken.stderr + broken.stdout
    cause = CAUSES["kill" if plan.fault in DAMAGES else plan.fault]
    if plan.restarts and broken.code == 0:
        cause = f"{cause}|{RESTARTED}"
    # After SIGTERM in Handler.train, the job saves and exits.
    must_save = plan.fault == "terminate" and not plan.delay and plan.place in IN_TRAINING
    if must_save:
        cause = "ended by a signal at step"
    # A job need not notice a pause. And once it has written as many checkpoints as it keeps,
    # deleting the oldest one can make enough room on a full disk.
    has_room = plan.fault == "full disk" and plan.place == "save" and plan.nth > KEEP
    must_show = hit and plan.fault != "pause" and not has_room
    if (broken.code or must_show) and not re.search(cause, text):
        raise Wrong(f"exit code {broken.code} without a clear error\n{text}")
    if must_save and plan.launcher != "torchrun" and broken.code != SIGTERM_CODE:
        raise Wrong(f"exit code {broken.code}, not {SIGTERM_CODE}, after a signal\n{text}")
    steps = re.findall(r"ended by a signal at step (\d+)", text)
    check_kept({checkpoint.NAME.format(int(step)) for step in steps}, after)
    restarted = broken.code == 0 and re.search(RESTARTED, text)
    loaded = re.findall(r"(step_\d+\.pt): epoch ", text)  # in the log line of Handler.load
    if restarted and max(loaded, default="") < max(before, default=""):
        raise Wrong(f"restarted by torchrun without loading {max(before)}\n{text}")


def check_no_crash(ended: Result) -> None:
    """Check that no process has crashed, such as by a segmentation fault."""
    text = ended.stderr + ended.stdout
    if re.search(CRASH, text):
        raise Wrong(f"exit code {ended.code}, but something has crashed\n{text}")


def check_equal(weights: Weights, expected: Weights, what: str) -> None:
    """Check that the weights are equal, bit for bit. `what` names them in the error."""
    if {n: _bits(weights[n]) for n in weights} != {n: _bits(expected[n]) for n in expected}:
        raise Wrong(f"{what}: not equal to those of the fault-free run")


def _bits(value: Any) -> Any:
    """Return what differs if a bit does: torch.equal takes -0.0 for 0.0, and ignores the dtype."""
    if not isinstance(value, torch.Tensor):  # the extra state of a module
        return value
    return value.dtype, value.shape, value.numpy().tobytes()
