"""Under nbval: 07 shows what a Slurm cluster answers, and is skipped where there is none."""

import os

import pytest
from lesson.slurm import has_cluster


def pytest_collection_modifyitems(items):
    if has_cluster() or "CI" in os.environ:
        return
    reason = "no Slurm cluster here: as root, `make slurm-up` makes one"
    for item in items:
        if item.path.name == "07_multinode_slurm.ipynb":
            item.add_marker(pytest.mark.skip(reason=reason))
