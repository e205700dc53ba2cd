"""Under nbval: 04 runs jobs on a Slurm cluster, and is skipped where there is none."""

import os
import subprocess
from pathlib import Path

import pytest

LOCAL = Path("/run/local-cluster-ddp/slurm.conf")  # what `make slurm-up` tells you to export


def pytest_collection_modifyitems(items):
    if LOCAL.exists():
        os.environ.setdefault("SLURM_CONF", str(LOCAL))
    if has_cluster() or "CI" in os.environ:
        return
    reason = "no Slurm cluster here: as root, `make slurm-up` makes one"
    for item in items:
        if item.path.name == "04_several_nodes.ipynb":
            item.add_marker(pytest.mark.skip(reason=reason))


def has_cluster():
    try:
        return subprocess.run(["sinfo"], capture_output=True, timeout=5).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
