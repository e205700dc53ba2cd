"""Elastic training on two Slurm nodes: the job goes on when tasks die, and another job joins."""

import signal

import pytest
import torch
from elastic_drill import train_plainly
from harness import ROOT
from slurm_cluster import END_OF_HEAD, Job, edited, project_folder

pytestmark = pytest.mark.slurm
STEPS = 1200


def test_tasks_die_and_a_second_job_joins(cluster, tmp_path):
    """The drill's job is the script in float64; a step of it takes at least 10 ms."""
    folder = project_folder(tmp_path / "project")
    (folder / "drill").symlink_to(ROOT / "drill")
    training = f"TRAIN=(drill/elastic_job.py --steps {STEPS})\n"
    training += """export ELASTIC_DRILL='["plain", 0.01]'\n"""
    template = edited(folder, "elastic_slurm_job.sh", END_OF_HEAD, training + END_OF_HEAD)
    with Job(cluster, template, cwd=folder) as job:
        job.wait_for(": 4 workers")
        job.signal_rank(1, signal.SIGKILL)
        job.wait_for(": 3 workers")
        for rank in (2, 3):  # all of the second node
            job.signal_rank(rank, signal.SIGKILL)
        job.wait_for(": 1 workers")
        with Job(cluster, "--nodes=1", template, job.id, cwd=folder) as second:
            job.wait_for(": 3 workers", times=2)
            fields = second.wait_until("COMPLETED", "FAILED")
            assert fields["ExitCode"] == "0:0", second.text()
        fields = job.wait_until("COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0", job.text()
    weights, (_, expected) = torch.load(folder / "elastic.pt"), train_plainly(STEPS)
    assert max((weights[name] - expected[name]).abs().max() for name in expected) < 1e-9
    assert not list(folder.glob("elastic-*.env"))
