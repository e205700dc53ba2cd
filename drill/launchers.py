"""The job's command line under each launcher, and which launchers there are here."""

import os
import subprocess
import sys
from pathlib import Path

from harness import SCRIPTS, clean_environment, torchrun
from plan import EPOCHS

JOB = Path(__file__).with_name("job.py")
SCRIPT = SCRIPTS / "train_reference.py"
CHECKPOINTS = "run"  # the folder, within that of the round
TIMEOUT = 15  # seconds of patience with a rank
SETTINGS = (
    f"training.num_epochs={EPOCHS}",
    "training.checkpoint_at=1",
    f"training.path={CHECKPOINTS}",
    f"parallel.timeout={TIMEOUT}",
)
CLUSTER = "/run/local-cluster-{}/slurm.conf"  # of scripts/slurm/local_cluster.sh


def command(launcher: str, restarts: int = 0) -> list[str | Path]:
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
    """Return what leads to the cluster: SLURM_CONF as it is set, else of the local cluster."""
    local = CLUSTER.format(os.environ.get("LOCAL_CLUSTER", "ddp"))
    found = os.environ.get("SLURM_CONF", local if Path(local).exists() else "")
    return {"SLURM_CONF": found} if found else {}


def host_process() -> int:
    """Return the id of the process under which the local cluster runs rank 0."""
    found = slurm_environment().get("SLURM_CONF")
    noted = Path(found).parent / "node1" / "pid" if found else None
    if noted is None or not noted.exists():
        raise OSError(f"it needs the cluster of make slurm-up, SLURM_CONF is {found}")
    return int(noted.read_text())


def why_no_slurm() -> str:
    """Return why there are no ranks of Slurm to strike, in a line; nothing if there are.

    The drill finds them by their process ids: they must be on this machine.
    """
    try:
        host_process()
    except OSError as error:
        return str(error)
    environment = clean_environment() | slurm_environment()
    states = ["sinfo", "--noheader", "--Node", "--responding", "--states=idle,mix,alloc"]
    try:
        asked = subprocess.run(
            states, env=environment, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Slurm cluster answers, make slurm-up starts one: {error}"
    if asked.returncode:
        return f"no Slurm cluster answers, make slurm-up starts one: {asked.stderr.strip()[-100:]}"
    nodes = len(asked.stdout.splitlines())
    return "" if nodes >= 2 else f"the Slurm cluster has {nodes} of 2 hosts that can take a job"
