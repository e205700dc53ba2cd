"""Check the tests: put one small fault at a time into the package, and see whether a test fails.

`make test-mutants` runs this script, which works in copies of the tree, in build/mutants. A fault
that survives shows a promise that no test checks. When code or tests have moved, update the table:
`tests/mutants.py --list` prints it, or says which faults no longer fit.
"""

import argparse
import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import uuid
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import psutil


@dataclass(frozen=True)
class Mutation:
    """A fault: in `file` of the package, `old` becomes `new`, and one of `tests` ought to fail."""

    name: str
    breaks: str  # what goes wrong, in a sentence
    file: str
    old: str  # occurs once in the file
    new: str
    tests: str  # files in tests/, separated by spaces
    keyword: str = ""  # for pytest's -k, where the whole files take much longer


MUTATIONS = (
    Mutation(
        "detection-weight",
        "A batch of detection targets counts the boxes of its first image, not its images.",
        "training/loss_and_metrics.py",
        "if items not in (None, samples):",
        "if False:",
        "test_adoption.py",
        "asks_for_count",
    ),
    Mutation(
        "keep-one-more",
        "Checkpoint(keep=N) keeps N + 1 files.",
        "training/callbacks.py",
        "ours[: -self.keep]",
        "ours[: -self.keep - 1]",
        "test_callbacks.py",
    ),
    Mutation(
        "checksum-ignored",
        "A checkpoint with a flipped bit in a tensor is loaded.",
        "training/checkpoint.py",
        'raise RuntimeError(f"wrong flag or checksum of {directories or changed}")',
        "pass",
        "test_checkpoint.py",
        "flipped",
    ),
    Mutation(
        "sums-in-float32",
        "reduce_sum and reduce_mean add up in float32, not in float64.",
        "collectives.py",
        "return torch.int64 if exact else torch.float64",
        "return torch.int64 if exact else torch.float32",
        "test_collectives.py",
    ),
    Mutation(
        "allow-list-by-name",
        "!pyobject reaches other modules, such as os, through the modules that are allowed.",
        "extras/config_file.py",
        "if not _under(home, allowed):",
        "if not _under(name, allowed):",
        "test_configuration.py",
    ),
    Mutation(
        "worker-dies-of-sigusr1",
        "A SIGUSR1 that was meant for the rank kills its DataLoader workers.",
        "training/loader_workers.py",
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "signal.signal(signal.SIGUSR1, signal.SIG_DFL)",
        "test_data.py",
        "leave",
    ),
    Mutation(
        "empty-is-set",
        "A launcher's variable that is set to nothing counts as set.",
        "launch.py",
        "else environ).items() if v}",
        "else environ).items()}",
        "test_launch.py",
        "empty_variable",
    ),
    Mutation(
        "every-backward-communicates",
        "DDP averages the gradients after every microbatch of an accumulation window.",
        "training/loop.py",
        "if enabled or not isinstance",
        "if True or not isinstance",
        "test_handler.py",
        "test_on_ranks",
    ),
    Mutation(
        "different-data-unnoticed",
        "Ranks with data sets of different lengths train anyway.",
        "training/rank_sync.py",
        "for other in every}) > 1:",
        "for other in every}) > 9:",
        "test_handler.py",
        "test_on_ranks",
    ),
    Mutation(
        "exit-not-shared",
        "A SystemExit or a KeyboardInterrupt in on_rank is raised on the executing rank alone.",
        "decorators.py",
        "except BaseException as error:",
        "except Exception as error:",
        "test_on_rank.py",
        "test_on_ranks",
    ),
    Mutation(
        "loopback-on-one-node",
        "The doctor calls a loopback master a problem on a single node too.",
        "extras/doctor.py",
        "if launch.nnodes > 1 and ipaddress.ip_address(address).is_loopback:",
        "if ipaddress.ip_address(address).is_loopback:",
        "test_doctor.py",
        "loopback",
    ),
    Mutation(
        "master-of-the-job",
        "The master is the first host of the Slurm job, not of the step.",
        "launch.py",
        'first_host(env["SLURM_STEP_NODELIST"])',
        'first_host(env["SLURM_JOB_NODELIST"])',
        "test_launch.py",
        "not scontrol",
    ),
    Mutation(
        "traceback-lost",
        "An exception from another process arrives without its traceback.",
        "decorators.py",
        r'add_note(error, f"raised on {where}:\n{trace}")',
        'add_note(error, f"raised on {where}")',
        "test_parallel_execution.py",
        "exception_keeps_its_type",
    ),
    Mutation(
        "no-eval-mode",
        "Models are evaluated in training mode, with dropout and with the batch's own statistics.",
        "training/model.py",
        "inner.eval()",
        "inner.train(inner.training)",
        "test_handler.py",
        "test_in_one_process",
    ),
    Mutation(
        "signal-not-shared",
        "The other ranks do not learn of a signal to one rank.",
        "training/rank_sync.py",
        "numbers = (count, self.stop, bool(self.signals))",
        "numbers = (count, self.stop, False)",
        "test_handler.py",
        "signal_to_one_rank",
    ),
    Mutation(
        "dead-worker-kept",
        "A ParallelExecutor cannot be used again after one of its workers died.",
        "workers/executor.py",
        "if worker.alive:",
        "if True:",
        "test_parallel_execution.py",
        "dead_worker",
    ),
    Mutation(
        "accumulation-divisor",
        "Accumulated batches of different sizes have the same weight in the gradient.",
        "training/rank_sync.py",
        "share = count / self.own if self.own else 0.0",
        "share = 1 / (1 if count == self.own else 3)",
        "test_handler.py",
        "test_in_one_process",
    ),
    Mutation(
        "zeros-of-a-host",
        "A Slurm host such as node001 loses its leading zeros.",
        "launch.py",
        r"\[([0-9]+)[^]]*\]",
        r"\[0*([0-9]+)[^]]*\]",
        "test_launch.py",
        "not scontrol",
    ),
    Mutation(
        "half-open-group",
        "An initialize_ddp that fails leaves the process group open.",
        "initialize.py",
        "if dist.is_initialized():  # torch",
        "if False:  # torch",
        "test_initialize.py",
        "half_open",
    ),
    Mutation(
        "closed-output",
        "A closed standard output costs the results of run_ranks.",
        "workers/run_ranks.py",
        "except (OSError, ValueError) as error:",
        "except OSError as error:",
        "test_run_ranks.py",
        "stdout_that_cannot_print",
    ),
    Mutation(
        "token-counts-of-one-rank",
        "With count=, each rank's gradient is over its own tokens, not over those of all ranks.",
        "training/rank_sync.py",
        "factor = count * (dist.get_world_size() / self._total)",
        "factor = torch.tensor(count / max(self.own, 1), dtype=torch.float64)",
        "test_adoption.py",
        "test_on_ranks",
    ),
    Mutation(
        "scheduler-step-forgotten",
        "A resumed run leaves out the step of a per-epoch scheduler that was due.",
        "training/loop.py",
        "self._step_epoch_scheduler()  # on a resume: the file is from before it stepped",
        "pass",
        "test_adoption.py",
        "test_in_one_process",
    ),
    Mutation(
        "stream-from-the-start",
        "A stream starts again in every epoch.",
        "training/data.py",
        "islice(self._stream, steps * self.accumulate)",
        "islice(self._endless(), steps * self.accumulate)",
        "test_adoption.py",
        "test_in_one_process",
    ),
    Mutation(
        "metric-object-shared",
        "Validation resets the metric objects of the epoch of training.",
        "training/loss_and_metrics.py",
        "= copy.deepcopy(objects)",
        "= dict(objects)",
        "test_adoption.py",
        "test_in_one_process",
    ),
    Mutation(
        "mean-of-means",
        "Validation returns the mean over batches, not over samples.",
        "training/evaluation.py",
        "sums.add(count, task.loss_fn(outputs, targets), outputs, targets)",
        "sums.add(1, task.loss_fn(outputs, targets), outputs, targets)",
        "test_handler.py",
        "test_in_one_process",
    ),
    Mutation(
        "clipped-before-unscaled",
        "Gradients are clipped before GradScaler has unscaled them.",
        "training/loop.py",
        "scaler.unscale_(optimizer)",
        "pass",
        "test_handler.py",
        "unscaled",
    ),
    Mutation(
        "call-without-its-ranks",
        "Calls of one function on_rank(0) and on_rank(1) are taken for the same call.",
        "decorators.py",
        "{name} on {listed} (call",
        "{name} (call",
        "test_on_rank.py",
        "test_on_ranks",
    ),
    Mutation(
        "keys-pile-up",
        "Each on_rank call leaves its keys in the store.",
        "decorators.py",
        'store.delete_key(f"{number - 1}{part}")',
        "pass",
        "test_on_rank.py",
        "test_on_ranks",
    ),
    Mutation(
        "lowest-loss-too-early",
        "The dot on the lowest loss has the wrong epoch if validation began after the first epoch.",
        "extras/figures.py",
        "epochs[list(values).index(low)]",
        "list(values).index(low) + 1",
        "test_run_folder.py",
        "began_late",
    ),
    Mutation(
        "no-set-epoch",
        "A DistributedSampler gives the same order in every epoch.",
        "training/data.py",
        "                set_epoch(epoch)",
        "                set_epoch(0)",
        "test_handler.py",
        "test_in_one_process",
    ),
    Mutation(
        "random-not-restored",
        "Loading a batch changes the state of Python's random module.",
        "randomness.py",
        'random.setstate(state["random"])',
        "pass",
        "test_data.py",
        "leave",
    ),
    Mutation(
        "missing-ranks-unnamed",
        "An opening that times out does not name the missing ranks.",
        "initialize.py",
        "missing = [other for other, key in enumerate(keys) if not store.check([key])] or [0]",
        "missing = [0]",
        "test_initialize.py",
        "missing",
    ),
    Mutation(
        "scheduler-state-dropped",
        "A checkpoint with a scheduler's state is loaded by a Handler that has no scheduler.",
        "handler.py",
        '"parts": {name: type(part).__name__ for name, part in self.loop.parts.items()},',
        '"parts": {},',
        "test_handler.py",
        "does_not_fit",
    ),
    Mutation(
        "late-column-too-early",
        "A list that began late stands beside the first epochs in history.csv.",
        "training/run_folder.py",
        '[""] * (last - len(values)) + [*values]',
        '[*values] + [""] * (last - len(values))',
        "test_run_folder.py",
        "began_late",
    ),
    Mutation(
        "other-default-in-yaml",
        "The default of sync_every in a YAML file is not Handler's.",
        "extras/config_schema.py",
        '"sync_every": _count(1, 10)',
        '"sync_every": _count(1, 1)',
        "test_configuration.py",
    ),
    Mutation(
        "spread-of-one-rank",
        "TrainerDDP's loss_std is over the batches of one rank, not of all ranks.",
        "extras/trainer.py",
        "self.spread(together=True)",
        "self.spread(together=False)",
        "test_trainer.py",
        "split_is_the_same",
    ),
    Mutation(
        "children-left-behind",
        "What a rank or a worker has started outlives it.",
        "workers/process.py",
        "os.killpg(self._process.pid, signal.SIGKILL)",
        "os.kill(self._process.pid, signal.SIGKILL)",
        "test_run_ranks.py",
        "leaves_behind",
    ),
    Mutation(
        "saved-though-not-finite",
        "A checkpoint is written although a weight is not finite.",
        "handler.py",
        "checkpoint.check_finite(self._unwrapped)",
        "pass",
        "test_handler.py",
        "not_finite_are_not_saved",
    ),
    Mutation(
        "maximum-of-a-loss",
        "ReduceLROnPlateau(mode='max') gets the loss.",
        "training/settings.py",
        'if pair[0].mode == "max" and pair[1] == "epoch":',
        "if False:",
        "test_adoption.py",
        "constructor_gives",
    ),
    Mutation(
        "late-list-too-early",
        "A list of the history that begins late has no NaN for the epochs before it.",
        "training/train_state.py",
        "[math.nan] * (self.epoch - 1 - len(column)) + [value]",
        "[value]",
        "test_handler.py test_callbacks.py test_trainer.py",
    ),
    Mutation(
        "bar-left-open",
        "The progress bar of an epoch is not closed.",
        "extras/progress_bar.py",
        "self._bar.close()",
        "pass",
        "test_callbacks.py",
        "progress_bar",
    ),
    Mutation(
        "exit-code-of-success",
        "A job that a signal ended looks like one that reached its end.",
        "training/loop.py",
        "raise Signalled(EXIT_CODE)",
        "raise Signalled(0)",
        "test_handler.py",
        "signal_to_one_rank",
    ),
    Mutation(
        "same-order-every-epoch",
        "Each epoch has the order of the first.",
        "training/samplers.py",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed)",
        "test_data.py",
        "order_and_padding",
    ),
    Mutation(
        "pickling-error-unexplained",
        "A value that cannot be sent to a worker is an error in pickle's words.",
        "workers/process.py",
        "except Exception as error:",
        "except KeyError as error:",
        "test_parallel_execution.py",
        "exception_keeps_its_type",
    ),
)

PACKAGE = Path("src") / "ddp_ref"
LIMIT = 420  # seconds for all tests of a mutation
MARK = "DDP_TEST_MUTANT"  # every process of a slot inherits it, whatever session it moves to
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--timeout=120"]
ENDS = ("killed", "SURVIVED", "ERROR")  # how a verdict begins
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+::\w+(?:\[.*?\](?= - |$))?)", re.MULTILINE)


class Result(NamedTuple):
    """The outcome of a mutation, or of its tests without it."""

    name: str
    verdict: str
    seconds: float
    output: str


class Slot:
    """A copy of the tree with its own environment, for one run at a time."""

    def __init__(self, root: Path, number: int, workers: int) -> None:
        self.folder, self.workers = root / "build" / "mutants" / str(number), workers
        self.environment = os.environ | {MARK: uuid.uuid4().hex}
        shutil.rmtree(self.folder, ignore_errors=True)
        copy_tree(root, self.folder)
        venv.create(self.folder / ".venv", symlinks=True)
        self.python = self.folder / ".venv" / "bin" / "python"
        (site,) = self.folder.glob(".venv/lib/python*/site-packages")
        # Python reads no .pth file in the last of these folders, so it finds the package of the
        # copy and not the editable install.
        paths = [self.folder / "src", self.folder, sysconfig.get_path("purelib")]
        (site / "mutants.pth").write_text("".join(f"{path}\n" for path in paths))
        code = "import importlib.util; print(importlib.util.find_spec('ddp_ref').origin)"
        command = [self.python, "-c", code]
        found = subprocess.check_output(command, text=True, env=self.environment).strip()
        if found != str(self.folder / PACKAGE / "__init__.py"):
            sys.exit(f"error: the tests would import {found}, not the copy in {self.folder}")

    def run(self, mutation: Mutation, mutate: bool) -> Result:
        """Run the tests of `mutation`, with its fault in the copy if `mutate`."""
        path, started = self.folder / PACKAGE / mutation.file, time.monotonic()
        text = path.read_text()
        try:
            write(path, text.replace(mutation.old, mutation.new) if mutate else text)
            code, output = self.pytest(mutation)
        finally:
            write(path, text)
        seconds = time.monotonic() - started
        if mutate:
            return Result(mutation.name, verdict(code, output), seconds, output)
        tests = f"{mutation.tests} {mutation.keyword}".rstrip()
        if code != 0:
            sys.exit(f"{output}\nerror: {tests} must pass without a mutation")
        return Result("no mutation", f"passed {tests}", seconds, output)

    def pytest(self, mutation: Mutation) -> tuple[int | None, str]:
        """Return the exit code of pytest, or None if it took too long, and what it printed."""
        options = ["-n", str(self.workers), "-m", "not full", "-k", mutation.keyword]
        command = [self.python, *PYTEST, *options, *(f"tests/{t}" for t in mutation.tests.split())]
        log = self.folder.with_suffix(".log")  # a process left behind would keep a pipe open
        with (
            log.open("wb") as out,
            subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self.kill()
        return code, log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill every process of this slot."""
        for _ in range(2):  # the second time, kill what was forked during the first
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if process.environ().get(MARK) == self.environment[MARK]:
                        process.kill()


def copy_tree(root: Path, folder: Path) -> None:
    """Copy the files that git tracks, or would track, from `root` to `folder`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=root, text=True)
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(root / name):  # git also lists a file that was deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)


def write(path: Path, text: str) -> None:
    """Write a module, and remove its bytecode: Python could take it for that of the new text."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def is_alive(result: Result) -> bool:
    return not result.verdict.startswith("killed")


def verdict(code: int | None, output: str) -> str:
    """Return what an exit code of pytest means for a mutation. None: pytest took too long."""
    if code is None:
        return f"killed by the limit of {LIMIT} s"
    if code == 0:
        return "SURVIVED"
    # With xdist, pytest -x exits with 2 instead of 1. It also exits with 2 if a test file cannot be
    # imported, but then it names no test. In that case, the mutation itself needs to be fixed.
    test = FAILED.search(output.rpartition("short test summary info")[2])
    if code == 1 or (code == 2 and test):
        return f"killed by {test[1] if test else 'a test'}"
    return f"ERROR: pytest ended in {code}"


def problems(root: Path, mutation: Mutation) -> Iterator[str]:
    """Yield what keeps `mutation` from being applied to the tree."""
    path = root / PACKAGE / mutation.file
    count = path.read_text().count(mutation.old) if path.exists() else 0
    if count != 1:
        yield f"{mutation.name}: its text must occur once in {path}, not {count} times"
        return
    try:
        ast.parse(path.read_text().replace(mutation.old, mutation.new))
    except SyntaxError as error:
        yield f"{mutation.name}: the mutated {path} is not Python: {error}"
    for test in (root / "tests" / name for name in mutation.tests.split()):
        if not test.is_file():
            yield f"{mutation.name}: there is no {test}"


def run_all(slots: Sequence[Slot], mutations: Sequence[Mutation], mutate: bool) -> list[Result]:
    """Print each result as it comes, and return them all. On Ctrl-C or an error, end all runs."""
    free: SimpleQueue[Slot] = SimpleQueue()
    for slot in slots:
        free.put(slot)

    def run_one(mutation: Mutation) -> Result:
        slot = free.get()
        try:
            return slot.run(mutation, mutate)
        finally:
            free.put(slot)

    results = []
    with ThreadPoolExecutor(len(slots)) as pool:
        futures = [pool.submit(run_one, mutation) for mutation in mutations]
        try:
            for future in as_completed(futures):
                results.append(result := future.result())
                print(f"{result.name:<26} {result.verdict}  {result.seconds:.0f} s", flush=True)
                if result.verdict.startswith("ERROR"):
                    print(*result.output.splitlines()[-40:], sep="\n", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                for slot in slots:
                    slot.kill()
    return results


def main() -> int:
    """Do what the command line says, and return the exit code."""
    parser = argparse.ArgumentParser(description="Find out which faults the tests notice.")
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names)
    parser.add_argument("--jobs", type=int, default=2, help="mutations at once")
    parser.add_argument("--workers", type=int, default=0, help="pytest's -n for each mutation")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--no-control", action="store_true", help="do not run the tests unmutated")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    options = parser.parse_args()
    root = options.root.resolve()
    chosen = [mutation for mutation in MUTATIONS if mutation.name in options.only]
    if wrong := [line for mutation in chosen for line in problems(root, mutation)]:
        sys.exit("\n".join(f"error: {line}" for line in wrong))
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.breaks}")
            print(f"    {mutation.file}, {mutation.tests} {mutation.keyword}".rstrip())
        return 0
    try:
        slots = [Slot(root, number, options.workers) for number in range(max(1, options.jobs))]
        if not options.no_control:
            distinct = {(mutation.tests, mutation.keyword): mutation for mutation in chosen}
            run_all(slots, [*distinct.values()], mutate=False)
        started = time.monotonic()
        results = run_all(slots, chosen, mutate=True)
    except KeyboardInterrupt:
        return 130
    ends = {what: [r.name for r in results if r.verdict.startswith(what)] for what in ENDS}
    killed, seconds = len(ends.pop("killed")), time.monotonic() - started
    left = "".join(f"; {what.lower()}: {', '.join(names)}" for what, names in ends.items() if names)
    print(f"{killed} of {len(results)} killed in {seconds:.0f} s{left}")
    return int(any(map(is_alive, results)))


if __name__ == "__main__":
    sys.exit(main())
