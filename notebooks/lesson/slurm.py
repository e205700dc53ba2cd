"""Commands on a Slurm cluster. Without a cluster, one line says so."""

import os
import subprocess
from pathlib import Path

from .commands import shell

NO_CLUSTER = "no Slurm cluster here: run `make slurm-up` as root, then run this cell again"


def slurm(command: str, *, folder: Path) -> str:
    """Run `command` as `shell` does, on the cluster that `has_cluster` finds.

    If no cluster answers, it prints one line that says so, and returns "".
    """
    if not has_cluster():
        print(NO_CLUSTER)
        return ""
    os.environ |= _cluster()
    return shell(command, folder=folder)


def has_cluster() -> bool:
    """Return whether a cluster answers: SLURM_CONF's, `make slurm-up`'s, or the machine's own."""
    try:
        asked = subprocess.run(
            ["sinfo"], env=os.environ | _cluster(), capture_output=True, timeout=5
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _cluster() -> dict[str, str]:
    """Return the variable by which Slurm finds the cluster of `make slurm-up`, if it is up."""
    name = os.environ.get("LOCAL_CLUSTER", "ddp")
    config = Path(f"/run/local-cluster-{name}/slurm.conf")
    return {"SLURM_CONF": str(config)} if config.exists() and "SLURM_CONF" not in os.environ else {}
