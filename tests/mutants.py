"""Check the tests: put one small fault at a time into the code, and see whether a test fails.

`make test-mutants` runs this script, which works in copies of the tree, in build. A fault that
survives shows a promise that no test checks. When code or tests have moved, update the table.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from harness import ROOT, marked

# Each fault: its name; what goes wrong; the file in the package, and pytest's arguments, with which
# a test ought to fail; the text that is replaced, which occurs once in the file; and the new text.
TABLE = r"""
keep-one-more
    Checkpoint(keep=N) keeps N + 1 files.
    callbacks.py | tests/test_callbacks.py
    - ours[: -self.keep]
    + ours[: -self.keep - 1]
checksum-ignored
    A checkpoint with a flipped bit in a tensor is loaded.
    checkpoint.py | tests/test_checkpoint.py -k flipped
    - raise RuntimeError(f"wrong flag or checksum of {directories or changed}")
    + pass
sums-in-float32
    reduce_sum and reduce_mean add up in float32, not in float64.
    collectives.py | tests/test_collectives.py
    - torch.int64 if exact else torch.float64, copy=True)
    + torch.int64 if exact else torch.float32, copy=True)
allow-list-by-name
    !pyobject reaches other modules, such as os, through the modules that are allowed.
    trainer.py | tests/test_configuration.py
    - if home.startswith(
    + if parts or home.startswith(
worker-dies-of-sigusr1
    A SIGUSR1 that was meant for the rank kills its DataLoader workers.
    signals.py | tests/test_data.py -k leave
    - for number in NUMBERS:
    + for number in NUMBERS[:1]:
different-data-unnoticed
    Ranks that differ in a setting or in their data train anyway.
    agreement.py | tests/test_agreement.py -k one_error
    - if all(value == values[0] for value in values):
    + if True:
drift-unnoticed
    Ranks whose parameters differ go on.
    agreement.py | tests/test_agreement.py -k drift
    - if high + low > TOLERANCE * abs(high):
    + if high + low > abs(high):
short-sampler
    A loader that ends early on one rank is a hang.
    data.py | tests/test_data.py -k ends_early
    - if len(found := list(islice(batches, wanted))) < wanted:
    + if len(found := list(islice(batches, wanted))) < 0:
exit-not-shared
    A SystemExit or a KeyboardInterrupt in on_rank is raised on the executing rank alone.
    decorators.py | tests/test_on_rank.py -k test_on_ranks
    - if own is not None:
    + if isinstance(own, Exception):
master-of-the-job
    The master is the first host of the Slurm job, not of the step.
    launch.py | tests/test_launch.py
    - first_host(env["SLURM_STEP_NODELIST"])
    + first_host(env["SLURM_JOB_NODELIST"])
no-eval-mode
    Models are evaluated in training mode, with dropout and with the batch's own statistics.
    model.py | tests/test_handler.py -k test_in_one_process
    - inner.eval()
    + inner.train(inner.training)
signal-not-shared
    The other ranks do not learn of a signal to one rank.
    handler.py | tests/test_handler.py -k signal_to_one_rank
    - stop, bool(self._signals))
    + stop, False)
accumulation-divisor
    Accumulated batches of different sizes have the same weight in the gradient.
    metrics.py | tests/test_handler.py -k test_in_one_process
    - return lambda count: count / own if own else 0.0
    + return lambda count: 1 / len(counts)
token-counts-of-one-rank
    With count=, each rank's gradient is over its own tokens, not over those of all ranks.
    metrics.py | tests/test_adoption.py -k test_on_ranks
    - if world_size == 1:
    + if world_size:
mean-of-means
    Validation returns the mean over batches, not over samples.
    handler.py | tests/test_handler.py -k test_in_one_process
    -  sums.add(count, loss, outputs, targets)
    +  sums.add(1, loss, outputs, targets)
clipped-before-unscaled
    Gradients are clipped before GradScaler has unscaled them.
    handler.py | tests/test_handler.py -k unscaled
    - scaler.unscale_(self.optimizer)
    + pass
connections-kept
    A rank that notices a dead rank keeps its connections, so that the others notice nothing.
    initialize.py | tests/test_faults.py -k dead_rank
    - dist.destroy_process_group(group.side)
    + pass
lowest-loss-too-early
    The dot on the lowest loss has the wrong epoch if validation began after the first epoch.
    figures.py | tests/test_run_folder.py -k began_late
    - epochs[list(values).index(low)]
    + list(values).index(low) + 1
random-not-restored
    Comparing the data changes the state of Python's random module.
    randomness.py | tests/test_agreement.py -k by_chance
    - random.setstate(state["random"])
    + pass
test-set-trained-on
    A resumed run with another split trains on items of the test set.
    trainer.py | tests/test_trainer.py -k not_with_other_training_data
    - if before not in (None, samples):
    + if False:
children-left-behind
    What a rank or a worker has started outlives it.
    workers.py | tests/test_run_ranks.py -k leaves_behind
    - os.killpg(self.process.pid, signal.SIGKILL)
    + os.kill(self.process.pid, signal.SIGKILL)
saved-though-not-finite
    A checkpoint is written although a weight is not finite.
    agreement.py | tests/test_handler.py -k not_finite_are_not_saved
    - if low == 1 and finite
    + if False and finite
maximum-of-a-loss
    ReduceLROnPlateau(mode='max') gets the loss.
    settings.py | tests/test_adoption.py -k constructor_gives
    - (unit == "epoch" and inner.mode == "max")
    + False
same-order-every-epoch
    Each epoch has the order of the first.
    data.py | tests/test_data.py -k order_and_padding
    - manual_seed(self.seed + self.epoch)
    + manual_seed(self.seed)
"""


class Mutation(NamedTuple):
    name: str
    breaks: str
    file: str
    tests: str
    old: str
    new: str


FIELDS = r"^([\w-]+)\n    (.+)\n    (\S+) \| (.+)\n    - (.+)\n    \+ (.+)$"
MUTATIONS = [Mutation(*fields) for fields in re.findall(FIELDS, TABLE, re.MULTILINE)]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "runs")
AT_ONCE = 2  # mutations
MARK = "DDP_TEST_MUTANT"  # every process of a run inherits it, whatever session it moves to
PYTEST = "-m pytest -x -q -n 0 -p no:cacheprovider --no-header --timeout=120"


def run(mutation: Mutation, mutated: bool) -> tuple[int, str]:
    """Run the tests of a mutation in a copy of the tree, which has the fault if `mutated`.

    Return the exit code of pytest, and what it printed.
    """
    with TemporaryDirectory(dir=ROOT / "build") as folder:
        copy, log = Path(folder, "copy"), Path(folder, "log")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_COPIED)
        file = copy / "src" / "ddp_ref" / mutation.file
        if mutated:
            file.write_text(file.read_text().replace(mutation.old, mutation.new))
        # These folders come before those of the editable install.
        paths = os.pathsep.join(map(str, [copy / "src", copy]))
        environment = os.environ | {"PYTHONPATH": paths, MARK: folder}
        command = [sys.executable, *shlex.split(f"{PYTEST} {mutation.tests}")]
        with log.open("wb") as out:  # a process left behind would keep a pipe open
            code = subprocess.call(command, cwd=copy, env=environment, stdout=out, stderr=out)
        while left := marked(folder, MARK):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        return code, log.read_text(errors="replace")


def verdict(mutation: Mutation) -> str:
    """Return what the tests say about a mutation."""
    started = time.monotonic()
    code, output = run(mutation, mutated=True)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if code == 0:
        said = "SURVIVED"
    elif code == 1 and failed:
        said = f"killed: {failed[0]}"
    else:
        said = f"ERROR: pytest ended in {code}\n{output[-4000:]}"
    return f"{said}  {time.monotonic() - started:.0f} s"


def unmutated(mutation: Mutation) -> str:
    """Exit unless the tests of a mutation pass without it."""
    code, output = run(mutation, mutated=False)
    if code != 0:
        sys.exit(f"{output}\nerror: {mutation.tests} must pass without a mutation")
    return f"passes without a mutation: {mutation.tests}"


def main() -> int:
    """Try all mutations, or those that are named on the command line; return the exit code."""
    names = sys.argv[1:] or [each.name for each in MUTATIONS]
    chosen = [each for each in MUTATIONS if each.name in names]
    if len(chosen) < len(names):
        sys.exit(f"error: there is no mutation of each of these names: {' '.join(names)}")
    (ROOT / "build").mkdir(exist_ok=True)
    verdicts = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in pool.map(unmutated, {each.tests: each for each in chosen}.values()):
            print(line, flush=True)
        for mutation, line in zip(chosen, pool.map(verdict, chosen), strict=True):
            print(f"{mutation.name:<26} {line}", flush=True)
            verdicts.append(line)
    killed = sum(line.startswith("killed") for line in verdicts)
    print(f"{killed} of {len(verdicts)} killed")
    return int(killed < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
