"""Commands on a Slurm cluster; where there is none, a line that says so."""

import os
import subprocess
from pathlib import Path

from .commands import shell

NO_CLUSTER = "no Slurm cluster here: `make slurm-up` makes one (Linux, root); then run this again"


def slurm(command: str, *, folder: Path) -> str:
    """Run `command` as `shell` does, on the cluster of SLURM_CONF, else of `make slurm-up`.

    Returns "", and says why in one line, where it does not answer.
    """
    if not has_cluster():
        print(NO_CLUSTER)
        return ""
    os.environ["SLURM_CONF"] = _config()
    return shell(command, folder=folder)


def has_cluster() -> bool:
    """Say whether the cluster of SLURM_CONF, else of `make slurm-up`, answers."""
    if not Path(_config()).exists():
        return False
    environment = os.environ | {"SLURM_CONF": _config()}
    try:
        asked = subprocess.run(["sinfo"], env=environment, capture_output=True, timeout=5)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _config() -> str:
    name = os.environ.get("LOCAL_CLUSTER", "ddp")
    return os.environ.get("SLURM_CONF", f"/run/local-cluster-{name}/slurm.conf")
