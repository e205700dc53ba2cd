"""Jobs that are stopped, requeued, killed or cut off end with an uninterrupted run's weights."""

import re
import signal

import pytest
from slurm_cluster import (
    END_OF_HEAD,
    Cluster,
    Job,
    assert_close,
    assert_same,
    edited,
    project_folder,
    trained_here,
    weights,
)

pytestmark = pytest.mark.slurm
EPOCHS = 20
TEMPLATES = {
    "torchrun on a node": ("single_node_multiple_gpu_slurm_job.sh", 2),
    "srun": ("multiple_nodes_single_gpu_slurm_job.sh", 2),
    "srun torchrun": ("multiple_nodes_multiple_gpu_slurm_job.sh", 4),
}


WITH_A_TIMEOUT = (  # the same training, with a timeout of 10 seconds
    "scripts/train_from_yaml.py --config scripts/configs/digits.yaml"
    " --set training.path=$RUN_DIR parallel.timeout=10"
)


def training(folder, template, command=f"scripts/train_reference.py {EPOCHS} 5"):
    """Write a copy of a template with another command to run; return its name."""
    return edited(folder, template, END_OF_HEAD, f"TRAIN=({command})\n{END_OF_HEAD}")


def check_resumes(job, folder, ranks, saved=None, starts=2):
    """Check that the job resumes in mid-training, and ends with an uninterrupted run's weights.

    They are the same bit for bit on two ranks, and up to rounding on more.
    """
    fields = job.wait_until("COMPLETED", "FAILED")
    assert (fields["ExitCode"], fields["Restarts"]) == ("0:0", str(starts - 1)), job.text()
    start = r"^(?:.*ddp_ref.handler: )?(no checkpoint|loaded \S+\.pt: epoch \d+, step \d+)"
    resumed = re.findall(start, job.text(), re.MULTILINE)
    assert len(resumed) == starts and resumed[0] == "no checkpoint", resumed
    if saved is not None:
        assert resumed[-1].endswith(f"step {saved}"), (resumed, saved)
    compare = assert_same if ranks == 2 else assert_close
    compare(weights(folder), trained_here("train_reference", EPOCHS, nproc=ranks))


def saved_at(job):
    """Wait until the ranks, told to stop, have saved. Return the step that they saved."""
    job.wait_for("ended by a signal at step")
    return int(re.search(r"ended by a signal at step (\d+)", job.text())[1])


@pytest.mark.parametrize("how", ["torchrun on a node", "srun"])
def test_a_job_that_is_told_to_stop_saves_and_requeues_itself(cluster, how, tmp_path):
    """Slurm signals the batch shell of each template, as it does 120 s before the time limit."""
    template, ranks = TEMPLATES[how]
    folder = project_folder(tmp_path / "project")
    with Job(cluster, training(folder, template), cwd=folder) as job:
        job.wait_for("epoch 3 |")
        for _ in range(2):  # the second signal must not end the wait for the ranks
            job.tell("scancel", "--batch", "--signal=USR1")
        saved = saved_at(job)
        job.start_again()
        check_resumes(job, folder, ranks, saved=saved)
    # The shell requeues the job after the ranks have ended. Otherwise they would have only
    # KillWait seconds to save.
    assert not re.search(r"STEP .* DUE TO JOB REQUEUE", job.text()), job.text()


def test_a_signal_to_the_steps(cluster, tmp_path):
    """Without --batch, `scancel --signal` signals the ranks, but not the batch shell."""
    folder = project_folder(tmp_path / "project")
    with Job(cluster, training(folder, TEMPLATES["srun"][0]), cwd=folder) as job:
        job.wait_for("epoch 3 |")
        job.tell("scancel", "--signal=USR1")
        fields = job.wait_until("FAILED", "COMPLETED", "PENDING")
        assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "143:0"), job.text()
        assert saved_at(job)


def test_requeued_by_scontrol_then_a_rank_is_killed(cluster, tmp_path):
    """`scontrol requeue` sends SIGTERM, which makes the ranks save. A killed rank ends the job.

    The job does not requeue itself after a failure, because it might fail again and again.
    """
    template, ranks = TEMPLATES["srun torchrun"]
    folder = project_folder(tmp_path / "project")
    with Job(cluster, training(folder, template), cwd=folder) as job:
        job.wait_for("epoch 3 |")
        cluster.control("requeue", job.id)
        saved = saved_at(job)
        job.start_again()
        job.wait_for(f"step_{saved:09}.pt: epoch")
        job.wait_for("epoch 7 |")
        job.signal_rank(ranks - 1, signal.SIGKILL)
        assert job.wait_until("FAILED", "COMPLETED")["JobState"] == "FAILED"
        cluster.control("requeue", job.id)
        job.start_again()
        check_resumes(job, folder, ranks, starts=3)


@pytest.mark.first
def test_a_cut_link_is_an_error_and_the_job_resumes_when_the_link_is_back(tmp_path):
    """The remaining rank raises after parallel.timeout. Slurm gives up the host after 30 s."""
    folder = project_folder(tmp_path / "project")
    template = training(folder, TEMPLATES["srun"][0], WITH_A_TIMEOUT)
    # No other job may run on this cluster.
    with Cluster() as own, Job(own, template, cwd=folder) as job:
        job.wait_for("step_000000")
        cut = own.do("on", "node2", "ip", "link", "set", "eth0", "down")
        assert cut.code == 0, cut.stderr
        job.wait_for("[rank0]: RuntimeError: ", timeout=20)
        # If several waits are in flight, the first one times out, which closes the connection.
        assert re.search("Timed out waiting 10000ms|Application timeout", job.text()), job.text()
        job.wait_until("PENDING", timeout=60)  # Slurm requeues a job when its host fails
        assert "Node failure on node2" in job.text()
        joined = own.do("on", "node2", "ip", "link", "set", "eth0", "up")
        assert joined.code == 0, joined.stderr
        # Not start_again: the orders to end the first run reach the host late, and would end the
        # second run. Slurm waits two minutes so that they arrive before it starts.
        job.wait_until("RUNNING", timeout=300)
        check_resumes(job, folder, 2)
