"""scripts/sanity.py: each check is silent in a healthy run and catches its mistake on all ranks."""

import subprocess
import sys
from datetime import timedelta

import pytest
from harness import SCRIPTS

from ddp_ref import run_ranks

sys.path.append(str(SCRIPTS))  # also for the ranks, which get this process's path
import sanity
import sanity_cases


@pytest.mark.gpu  # with a GPU for each rank, the ranks use nccl, else gloo
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_on_ranks(world):
    run_ranks(sanity_cases.try_all, nproc=world, timeout=timedelta(minutes=2))


def test_each_of_the_nine_checks_has_cases():
    names, cases = (
        [name for name in vars(module) if name.startswith("check_")]
        for module in (sanity, sanity_cases)
    )
    assert names == cases and len(names) == 9


def test_the_file_works_on_its_own(tmp_path):
    """Copied into an empty folder, it needs nothing of this repository."""
    (tmp_path / "sanity.py").write_text((SCRIPTS / "sanity.py").read_text())
    code = "import sanity, sys; sanity.check_epochs_differ([0, 1], [1, 0]);"
    code += "sys.exit(bool({'ddp_ref', 'datautils'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
