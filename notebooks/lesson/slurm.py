"""Commands on a Slurm cluster; where there is none, a line that says so."""

import os
import subprocess
from pathlib import Path

from .commands import shell

NO_CLUSTER = "no Slurm cluster here: `make slurm-up` makes one (Linux, root); then run this again"


def slurm(command: str, *, folder: Path) -> str:
    """Run `command` as `shell` does, on the cluster that `has_cluster` asks.

    Returns "", and says why in one line, where none answers.
    """
    if not has_cluster():
        print(NO_CLUSTER)
        return ""
    os.environ |= _cluster()
    return shell(command, folder=folder)


def has_cluster() -> bool:
    """Say whether a cluster answers: SLURM_CONF's, else `make slurm-up`'s, else the machine's."""
    try:
        asked = subprocess.run(
            ["sinfo"], env=os.environ | _cluster(), capture_output=True, timeout=5
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _cluster() -> dict[str, str]:
    """Return the variable by which Slurm finds the cluster, if it needs one."""
    name = os.environ.get("LOCAL_CLUSTER", "ddp")
    config = Path(f"/run/local-cluster-{name}/slurm.conf")
    return {"SLURM_CONF": str(config)} if config.exists() and "SLURM_CONF" not in os.environ else {}
