"""Elastic training on two Slurm nodes: the job goes on when tasks die, and another job joins."""

import re
import signal

import pytest
import torch
from elastic_drill import train_plainly
from harness import ROOT, wait_until
from slurm_cluster import END_OF_HEAD, Job, edited, project_folder

pytestmark = pytest.mark.slurm
STEPS = 3000


def wait_for_workers(job, number):
    """Wait until the newest group of the job has so many workers."""

    def has_them():
        sizes = re.findall(r"^step \d+: (\d+) workers", job.text(), re.M)
        return sizes and int(sizes[-1]) == number

    wait_until(has_them, 60)


def test_tasks_die_and_a_second_job_joins(cluster, tmp_path):
    """The drill's job is the script in float64; a step of it takes at least 10 ms."""
    folder = project_folder(tmp_path / "project")
    (folder / "drill").symlink_to(ROOT / "drill")
    training = f"TRAIN=(drill/elastic_job.py --steps {STEPS})\n"
    training += """export ELASTIC_DRILL='["plain", 0.01]'\n"""
    template = edited(folder, "elastic_slurm_job.sh", END_OF_HEAD, training + END_OF_HEAD)
    with Job(cluster, template, cwd=folder) as job:
        wait_for_workers(job, 4)
        job.signal_rank(1, signal.SIGKILL)
        wait_for_workers(job, 3)
        for rank in (2, 3):  # all of the second node
            job.signal_rank(rank, signal.SIGKILL)
        wait_for_workers(job, 1)
        with Job(cluster, "--nodes=1", template, job.id, cwd=folder) as second:
            wait_for_workers(job, 3)
            fields = second.wait_until("COMPLETED", "FAILED")
            assert fields["ExitCode"] == "0:0", second.text()
        fields = job.wait_until("COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0", job.text()
    weights, (_, expected) = torch.load(folder / "elastic.pt"), train_plainly(STEPS)
    assert max((weights[name] - expected[name]).abs().max() for name in expected) < 1e-9
    assert not list(folder.glob("elastic-*.env"))
