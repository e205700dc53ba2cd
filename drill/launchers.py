"""The job's command under each launcher, and whether this machine has a Slurm cluster for it."""

import os
import subprocess
import sys
from pathlib import Path

from harness import SCRIPTS, clean_environment, torchrun
from plan import EPOCHS

JOB = Path(__file__).with_name("job.py")
SCRIPT = SCRIPTS / "train_reference.py"
CHECKPOINTS = "run"  # the folder of the checkpoints, inside the folder of the round
TIMEOUT = 15  # seconds: parallel.timeout
SETTINGS = (
    f"training.num_epochs={EPOCHS}",
    "training.checkpoint_at=1",
    f"training.path={CHECKPOINTS}",
    f"parallel.timeout={TIMEOUT}",
)
# Where scripts/slurm/local_cluster.sh writes the configuration of its cluster.
CLUSTER = "/run/local-cluster-{}/slurm.conf"


def job_command(launcher: str, restarts: int = 0) -> list[str | Path]:
    """Return the command that runs the job on two ranks."""
    job: list[str | Path] = [
        JOB,
        "--config",
        SCRIPTS / "configs" / "digits.yaml",
        "--set",
        *SETTINGS,
    ]
    if launcher == "spawn":
        return [sys.executable, *job, "--nproc", "2"]
    if launcher == "torchrun":
        return torchrun(2, *job, restarts=restarts)
    options = ["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--quit-on-interrupt"]
    return ["srun", *options, sys.executable, *job]


def slurm_environment() -> dict[str, str]:
    """Return SLURM_CONF if it is set, otherwise the local cluster's if that is up."""
    local = CLUSTER.format(os.environ.get("LOCAL_CLUSTER", "ddp"))
    path = os.environ.get("SLURM_CONF", local if Path(local).exists() else "")
    return {"SLURM_CONF": path} if path else {}


def host_process() -> int:
    """Return the id of the process in which the local cluster runs its first host.

    Raises:
        OSError: If there is no local cluster.
    """
    config = slurm_environment().get("SLURM_CONF")
    pid_file = Path(config).parent / "node1" / "pid" if config else None
    if pid_file is None or not pid_file.exists():
        raise OSError(f"it needs the cluster of make slurm-up, but SLURM_CONF is {config}")
    return int(pid_file.read_text())


def why_no_slurm() -> str:
    """Return in one line why the drill cannot use Slurm, or "" if it can.

    The drill sends signals to process ids, so Slurm must run its jobs on this machine.
    """
    try:
        host_process()
    except OSError as error:
        return str(error)
    environment = clean_environment() | slurm_environment()
    states = ["sinfo", "--noheader", "--Node", "--responding", "--states=idle,mix,alloc"]
    try:
        answer = subprocess.run(
            states, env=environment, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Slurm cluster answers, make slurm-up starts one: {error}"
    if answer.returncode:
        return f"no Slurm cluster answers, make slurm-up starts one: {answer.stderr.strip()[-100:]}"
    hosts = len(answer.stdout.splitlines())
    return "" if hosts >= 2 else f"the Slurm cluster has {hosts} of 2 hosts that can run jobs"
