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
    name = os.environ.get("LOCAL_CLUSTER", "ddp")
    config = os.environ.get("SLURM_CONF", f"/run/local-cluster-{name}/slurm.conf")
    if not _answers(config):
        print(NO_CLUSTER)
        return ""
    os.environ["SLURM_CONF"] = config
    return shell(command, folder=folder)


def _answers(config: str) -> bool:
    if not Path(config).exists():
        return False
    environment = os.environ | {"SLURM_CONF": config}
    try:
        asked = subprocess.run(["sinfo"], env=environment, capture_output=True, timeout=5)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
