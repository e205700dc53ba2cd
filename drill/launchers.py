"""The job's command under each launcher, and the local Slurm cluster for srun."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
from harness import SCRIPTS, clean_environment, torchrun
from plan import EPOCHS

JOB = Path(__file__).with_name("job.py")
CHECKPOINTS = "checkpoints"  # their folder, inside the folder of the round
# The folder of the cluster that `make slurm-up` starts.
CLUSTER = Path(f"/run/local-cluster-{os.environ.get('LOCAL_CLUSTER', 'ddp')}")
SLURM = {"SLURM_CONF": str(CLUSTER / "slurm.conf")}


def job_command(launcher: str, restarts: int = 0) -> list[str | Path]:
    """Return the command that runs the job on two ranks. It saves after every epoch."""
    if launcher == "spawn":  # this file describes the training of train_reference.py
        settings = [f"training.num_epochs={EPOCHS}", "training.checkpoint_at=1"]
        settings.append(f"training.path={CHECKPOINTS}")
        config = SCRIPTS / "configs" / "digits.yaml"
        return [sys.executable, JOB, "--nproc=2", "--config", config, "--set", *settings]
    job: list[str | Path] = [JOB, str(EPOCHS), "1"]
    if launcher == "torchrun":
        return torchrun(2, *job, restarts=restarts)
    options = ["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--quit-on-interrupt"]
    return ["srun", *options, sys.executable, *job]


def slurm(*command: str) -> None:
    """Run a Slurm command. Raise CalledProcessError if it fails."""
    environment = clean_environment() | SLURM
    subprocess.run(command, env=environment, timeout=30, check=True, capture_output=True)


def slurm_host() -> int:
    """Return the process id of the local cluster's first host; raise OSError if there is none."""
    path = CLUSTER / "node1" / "pid"
    pid = int(path.read_text()) if path.exists() else -1
    if not psutil.pid_exists(pid):
        raise OSError("srun needs the cluster that make slurm-up starts")
    return pid
