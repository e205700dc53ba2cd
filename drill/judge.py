"""Say whether a round ended right: nothing is lost, the cause is told, the weights are equal."""

import re
import signal
from collections.abc import Set

import torch
from harness import Result
from plan import DAMAGES, KEEP, STEPS, Plan

from ddp_ref.training import checkpoint

Weights = dict[str, torch.Tensor]
CAUSES = {  # in the words of the rank, or of its launcher
    "kill": "SIGKILL|Killed|exitcode: -9",
    "stop": "[Tt]imed out|timeout after|did not (arrive|open the group)|one stopped answering"
    "|the master does not answer|cannot reach the master",
    "pause": "(?!)",  # it must go on
    "interrupt": "SIGINT|nterrupt|sending Ctrl-C|exitcode: -2",
    # torchrun ends the other ranks with "closing signal SIGTERM" after any failure.
    "terminate": "ended by a signal at step|(?<!closing signal )(?<!via )SIGTERM|Terminated"
    "|got signal: 15|exitcode: -15",
    "exception": "RuntimeError: the drill's own on rank",
    "full disk": "No space left on device",
}
# Of a job that it starts anew, torchrun names the rank with the first error by the second: of a
# killed one it counts when it saw that, of another when it raised, as its peer was gone.
RESTARTED = r"failed \(exitcode: -?\d+\) local_rank: \d"
ANSWERED = 128 + signal.SIGTERM  # the exit code, but torchrun has its own
CRASH = (
    "terminate called|Fatal Python error|Segmentation fault|SIGSEGV|SIGABRT|core dumped"
    r"|tasks? \S+: Aborted|Bus error|SIGBUS|Illegal instruction|SIGILL"
    r"|(free|malloc)\(\): |double free"
)
LOADED = r"(step_\d+\.pt): epoch "  # in the log line of Handler.load


class Wrong(AssertionError):
    """A round that did not end right, as harness's own errors are."""


def check_kept(before: Set[str], after: Set[str]) -> None:
    """Raise Wrong where a checkpoint from before the fault is gone, but for newer ones."""
    newest = sorted(before | after)[-KEEP:]
    if lost := set(newest) - after:
        raise Wrong(f"lost {', '.join(sorted(lost))}, left are {sorted(after)}")


def due(plan: Plan) -> set[str]:
    """Return the checkpoints that must be there when the rank has come to its place."""
    epochs = range(1, plan.epochs_saved + 1)[-KEEP:]
    return {checkpoint.NAME.format(epoch * STEPS) for epoch in epochs}


def check_clear(plan: Plan, broken: Result, whole: Set[str], hit: bool) -> None:
    """Raise Wrong unless what was written names the cause and is true, and nothing has crashed.

    A job may only go on in silence where it need not have noticed the fault, or where the fault
    came too late to hit it.
    """
    text = broken.stderr + broken.stdout
    check_no_crash(broken)
    cause = CAUSES["kill" if plan.fault in DAMAGES else plan.fault]
    if plan.restarts and broken.code == 0:
        cause = f"{cause}|{RESTARTED}"
    if plan.is_answered:
        cause = "ended by a signal at step"
    if (broken.code or (hit and plan.must_show)) and not re.search(cause, text):
        raise Wrong(f"exit code {broken.code} without a clear error\n{text}")
    if plan.is_answered and plan.launcher != "torchrun" and broken.code != ANSWERED:
        raise Wrong(f"exit code {broken.code}, not {ANSWERED}, after a signal\n{text}")
    steps = re.findall(r"ended by a signal at step (\d+)", text)
    check_kept({checkpoint.NAME.format(int(step)) for step in steps}, whole)


def check_restart(broken: Result, before: Set[str]) -> None:
    """Raise Wrong where torchrun has started the job again, but it did not load its checkpoint."""
    loaded = max(re.findall(LOADED, broken.stderr), default="")
    if before and loaded < max(before) and re.search(RESTARTED, broken.stderr):
        raise Wrong(f"restarted by torchrun without loading {max(before)}\n{broken.stderr}")


def check_no_crash(ended: Result) -> None:
    """Raise Wrong where a process has ended by a fault of the program."""
    text = ended.stderr + ended.stdout
    if re.search(CRASH, text):
        raise Wrong(f"exit code {ended.code}, but something has crashed\n{text}")


def check_equal(found: Weights, expected: Weights, what: str) -> None:
    """Raise Wrong unless both have the same bits."""
    same = found.keys() == expected.keys()
    if not same or not all(_same_bits(found[name], expected[name]) for name in expected):
        raise Wrong(f"{what}: not equal to those of the unbroken run")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes: torch.equal takes -0.0 for 0.0, and a float32 for the same float64."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
