"""Start clusters with local_cluster.sh, and run jobs on them that leave nothing behind."""

import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from harness import MARK, SCRIPTS, Result, clean_environment, marked, run, settle, torchrun

LOCAL_CLUSTER = SCRIPTS / "slurm" / "local_cluster.sh"
END_OF_HEAD = "# ---- You need not edit anything below."
NUMBERS = itertools.count(os.getpid())  # no two clusters of a test run share a network
END_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class Cluster:
    """A Slurm cluster with its own name and network. It is up inside the `with` block."""

    def __init__(self) -> None:
        self.name = f"ddp-{uuid.uuid4().hex[:8]}"
        worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
        self.net = f"10.{200 + int(worker) % 13}.{next(NUMBERS) % 256}"
        self.state = Path(f"/run/local-cluster-{self.name}")
        self.env = {"SLURM_CONF": str(self.state / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        started = self.do("up")
        assert started.code == 0, started.stderr
        return self

    def __exit__(self, *_: object) -> None:
        self.do("down")

    def do(self, *verb: str) -> Result:
        """Run local_cluster.sh for this cluster. The daemons that `up` starts keep running."""
        return run_unwatched(LOCAL_CLUSTER, *verb, env=self.names)

    def on(self, host: str, *command: str | Path) -> list[str | Path]:
        """Return the command that runs `command` on one of the hosts."""
        names = [f"{name}={value}" for name, value in self.names.items()]
        return ["env", *names, LOCAL_CLUSTER, "on", host, *command]

    @property
    def names(self) -> dict[str, str]:
        """Return the variables that tell local_cluster.sh the name and network of the cluster."""
        return {"LOCAL_CLUSTER": self.name, "LOCAL_CLUSTER_NET": self.net}

    def run(self, *command: str | Path, cwd: Path, timeout: float = 240) -> Result:
        """Run a Slurm client, such as srun, until it ends."""
        return run(*command, cwd=cwd, timeout=timeout, env=self.env)

    def control(self, *command: str) -> str:
        """Return what `scontrol` prints. Fail if it exits with an error."""
        ended = run_unwatched("scontrol", *command, env=self.env)
        assert ended.code == 0, ended.stderr
        return ended.stdout


class Job:
    """A batch job. When its `with` block ends, the job is ended, and no process may be left."""

    def __init__(self, cluster: Cluster, *sbatch: str | Path, cwd: Path) -> None:
        self.cluster, self.mark = cluster, uuid.uuid4().hex
        self.log = cwd / f"{self.mark}.log"
        command = ["sbatch", "--parsable", f"--output={self.log}", *sbatch]
        submitted = run_unwatched(*command, env=cluster.env | {MARK: self.mark}, cwd=cwd)
        assert submitted.code == 0, submitted.stderr
        self.id = submitted.stdout.strip()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.fields()["JobState"] not in END_STATES:
            self.tell("scancel")
            self.wait_until(*END_STATES)
        left = settle(self.mark, 5)
        for process in left:
            process.kill()
        assert kind or not left, f"processes left behind: {left}"

    def fields(self) -> dict[str, str]:
        """Return what Slurm knows about the job."""
        words = self.cluster.control("show", "job", "--oneliner", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_until(self, *states: str, timeout: float = 240) -> dict[str, str]:
        """Return the fields once the job is in one of `states`."""
        deadline = time.monotonic() + timeout
        while (state := (fields := self.fields())["JobState"]) not in states:
            assert time.monotonic() < deadline, f"{state}, not {states}:\n{self.text()}"
            time.sleep(0.1)
        return fields

    def wait_for(self, text: str, timeout: float = 240) -> None:
        """Wait until the log contains `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.text():
            state = self.fields()["JobState"]
            over = state in END_STATES and text not in self.text()
            assert not over and time.monotonic() < deadline, f"{state}, no {text!r}:\n{self.text()}"
            time.sleep(0.05)

    def tell(self, *command: str) -> None:
        """Run a Slurm command on this job, such as `scancel --signal=USR1`."""
        self.cluster.run(*command, self.id, cwd=self.log.parent, timeout=30)

    def start_again(self) -> None:
        """Let the requeued job start soon. By itself, Slurm would wait two minutes.

        The job must not start within the same second in which it ended: a host refuses a job
        whose credential dates from that second.
        """
        self.wait_until("PENDING")
        self.cluster.control("update", f"JobId={self.id}", "StartTime=now+2")

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to the process of one rank."""
        processes = []
        for process in marked(self.mark):
            with suppress(psutil.NoSuchProcess):  # it is just ending
                if "python" in process.name():
                    processes.append((process, process.environ()))
        victims = [p for p, env in processes if env.get("RANK") == str(rank)] or [
            p for p, env in processes if env.get("SLURM_PROCID") == str(rank)
        ]  # without torchrun, each task is a rank
        assert len(victims) == 1, victims
        victims[0].send_signal(number)


def run_unwatched(*command: str | Path, env: dict[str, str], cwd: Path | None = None) -> Result:
    """Run a command that may leave processes running, such as a daemon or a job."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment() | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Result(ended.stdout, ended.stderr, ended.returncode)


def edited(folder: Path, template: str, before: str, after: str) -> str:
    """Write a copy of a template with one part of its header replaced; return the file's name."""
    text = (SCRIPTS / "slurm" / template).read_text()
    head, mark, _ = text.partition(END_OF_HEAD)
    assert text.count(END_OF_HEAD) == 1 and (head + mark).count(before) == 1
    (folder / "job.sh").write_text(text.replace(before, after, 1))
    return "job.sh"


def project_folder(folder: Path) -> Path:
    """Make `folder` look like the project's root to a template."""
    folder.mkdir(exist_ok=True)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "scripts").symlink_to(SCRIPTS)
    return folder


def weights(folder: Path) -> list[torch.Tensor]:
    """Return the weights that a script has saved in `folder`."""
    files = [*folder.glob("snapshot.pt"), *folder.glob("checkpoint.pt")]
    files += sorted([*folder.glob("runs/*/step_*.pt"), *folder.glob("checkpoints/step_*.pt")])
    content = torch.load(files[-1], weights_only=True)
    return list(content.get("model", content).values())


@cache
def trained_here(script: str, epochs: int, nproc: int = 1, batch_size: int = 32) -> list[Any]:
    """Return the weights that `nproc` processes end with on this machine, without Slurm.

    The script is "train_reference", or any other name for the ladder.
    """
    command = [sys.executable, SCRIPTS / "multigpu_spawn.py", f"--nproc={nproc}"]
    if script == "train_reference":
        command = torchrun(nproc, SCRIPTS / "train_reference.py")
    with TemporaryDirectory() as folder:
        ended = run(*command, str(epochs), f"--batch_size={batch_size}", cwd=Path(folder))
        assert ended.code == 0, ended.stderr
        return weights(Path(folder))


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Assert that the weights are equal except for rounding: sums may be added in another order."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Assert that the weights are equal, bit for bit."""
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
