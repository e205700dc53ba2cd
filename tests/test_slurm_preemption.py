"""Jobs that are told to stop, requeued, killed or cut off end at the weights of an unbroken run."""

import re
import signal
import sys

import pytest
from harness import SCRIPTS, run
from slurm_cluster import (
    END_OF_HEAD,
    Cluster,
    Job,
    assert_same,
    edited,
    project_folder,
    weights,
)

pytestmark = pytest.mark.slurm
EPOCHS = 20
TEMPLATES = {
    "torchrun on a node": ("single_node_multiple_gpu_slurm_job.sh", 2),
    "srun": ("multiple_nodes_single_gpu_slurm_job.sh", 2),
    "srun torchrun": ("multiple_nodes_multiple_gpu_slurm_job.sh", 4),
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the weights of a run that nobody disturbed, by its number of ranks and epochs."""
    found = {}

    def train(ranks, epochs=EPOCHS):
        if (ranks, epochs) not in found:
            folder = tmp_path_factory.mktemp("unbroken")
            flags = ["--config", SCRIPTS / "configs" / "digits.yaml", "--nproc", str(ranks)]
            flags += ["--set", f"training.num_epochs={epochs}"]
            ended = run(sys.executable, SCRIPTS / "train_reference.py", *flags, cwd=folder)
            assert ended.code == 0, ended.stderr
            found[ranks, epochs] = weights(folder)
        return found[ranks, epochs]

    return train


def with_settings(folder, template, *settings, epochs=EPOCHS):
    """Write a template with more settings, below those of its head, and return its name."""
    line = f"TRAIN+=({' '.join([f'training.num_epochs={epochs}', *settings])})\n"
    return edited(folder, template, END_OF_HEAD, line + END_OF_HEAD)


def check_goes_on(job, folder, expected, saved=None, starts=2):
    """The job that starts again goes on in mid-training and ends at the weights of `expected`."""
    fields = job.wait_until("COMPLETED", "FAILED")
    assert (fields["ExitCode"], fields["Restarts"]) == ("0:0", str(starts - 1)), job.text()
    found = re.findall(
        r"ddp_ref.handler: (no checkpoint|loaded \S+\.pt: epoch \d+, step \d+)", job.text()
    )
    assert len(found) == starts and found[0] == "no checkpoint", found
    if saved is not None:
        assert found[-1].endswith(f"step {saved}"), (found, saved)
    assert_same(weights(folder), expected)


def saved_at(job):
    """Return the step at which the ranks, told to stop, have saved."""
    job.wait_for("ended by a signal at step")
    return int(re.search(r"ended by a signal at step (\d+)", job.text())[1])


@pytest.mark.parametrize("how", TEMPLATES)
def test_told_to_stop_it_saves_and_requeues_itself(cluster, unbroken, how, tmp_path):
    """As 120 s before the time limit, Slurm signals the batch shell, of every template."""
    template, ranks = TEMPLATES[how]
    folder = project_folder(tmp_path / "project")
    with Job(cluster, with_settings(folder, template), cwd=folder) as job:
        job.wait_for("epoch 3 |")
        for _ in range(2):  # the second says nothing new, and must not hurry the job
            job.tell("scancel", "--batch", "--signal=USR1")
        saved = saved_at(job)
        job.start_again()
        check_goes_on(job, folder, unbroken(ranks), saved=saved)
    # The shell waits for the ranks. Requeued before, they would have KillWait and no more.
    assert not re.search(r"STEP .* DUE TO JOB REQUEUE", job.text()), job.text()


def test_a_signal_to_the_steps(cluster, unbroken, tmp_path):
    """What `scancel --signal` sends without --batch reaches the ranks, and not the batch shell."""
    folder = project_folder(tmp_path / "project")
    with Job(cluster, with_settings(folder, TEMPLATES["srun"][0]), cwd=folder) as job:
        job.wait_for("epoch 3 |")
        job.tell("scancel", "--signal=USR1")
        fields = job.wait_until("FAILED", "COMPLETED", "PENDING")
        assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "143:0"), job.text()
        cluster.control("requeue", job.id)
        job.start_again()
        check_goes_on(job, folder, unbroken(2), saved=saved_at(job))


def test_the_time_limit(cluster, tmp_path):
    """Slurm itself gives the signal: a minute before the end of two, or up to 30 s earlier."""
    folder = project_folder(tmp_path / "project")
    template = with_settings(folder, TEMPLATES["srun"][0], epochs=100_000)
    with Job(cluster, "--time=2", "--signal=B:USR1@60", template, cwd=folder) as job:
        saved = saved_at(job)
        job.start_again()
        job.wait_for(f"step_{saved:09}.pt: epoch")
        before = job.text().count("INFO ddp_ref.handler: epoch")
        job.wait_for("INFO ddp_ref.handler: epoch", times=before + 2)  # it trains on


@pytest.mark.parametrize("how", ["srun", "srun torchrun"])
def test_requeued_by_scontrol_then_a_rank_is_killed(cluster, unbroken, how, tmp_path):
    """SIGTERM makes the ranks save; a killed rank ends the job.

    A failure is not requeued by the job itself: it might come again and again.
    """
    template, ranks = TEMPLATES[how]
    folder = project_folder(tmp_path / "project")
    with Job(cluster, with_settings(folder, template), cwd=folder) as job:
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
        check_goes_on(job, folder, unbroken(ranks), starts=3)


@pytest.mark.parametrize("how", ["srun", "srun torchrun"])
def test_a_killed_rank_ends_the_job_where_another_is_frozen(cluster, how, tmp_path):
    """SIGTERM does not reach the frozen rank; Slurm kills it KillWait later.

    It does not start again here: an order of the first run comes a minute late to such a host, and
    would end the second one if that did not wait its two minutes.
    """
    template, ranks = TEMPLATES[how]
    folder = project_folder(tmp_path / "project")
    with Job(cluster, with_settings(folder, template, epochs=1000), cwd=folder) as job:
        job.wait_for("epoch 3 |")
        job.signal_rank(0, signal.SIGSTOP)
        job.signal_rank(ranks - 1, signal.SIGKILL)
        assert job.wait_until("FAILED", "COMPLETED")["JobState"] == "FAILED"


def test_multinode_slurm_goes_on_from_the_last_epoch(cluster, tmp_path):
    """It has no handler for signals: what the epoch has done is lost, the epochs before are not."""
    flags = f"--epochs {EPOCHS} --save-every 1"
    (tmp_path / "job.sh").write_text(
        f"#!/bin/bash\nsrun --kill-on-bad-exit=1 {sys.executable} "
        f"{SCRIPTS / 'multinode_slurm.py'} {flags}\n"
    )
    (tmp_path / "unbroken").mkdir()
    command = [sys.executable, SCRIPTS / "multigpu_spawn.py", "--epochs", str(EPOCHS)]
    ended = run(*command, cwd=tmp_path / "unbroken")
    assert ended.code == 0, ended.stderr
    options = ["--nodes=2", "--ntasks-per-node=1", "--open-mode=append"]
    with Job(cluster, *options, "job.sh", cwd=tmp_path) as job:
        job.wait_for("epoch 3 | saved")
        cluster.control("requeue", job.id)
        job.start_again()
        job.wait_for("epoch 7 | saved")
        job.signal_rank(1, signal.SIGKILL)
        assert job.wait_until("FAILED", "COMPLETED", timeout=30)["JobState"] == "FAILED"
        cluster.control("requeue", job.id)
        job.start_again()
        fields = job.wait_until("COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0" and fields["Restarts"] == "2", job.text()
        done = [int(number) for number in re.findall(rf"(\d+) of {EPOCHS} epochs", job.text())]
        assert done[0] == 0 and 3 <= done[1] < 7 <= done[2] < EPOCHS, done
    assert_same(weights(tmp_path), weights(tmp_path / "unbroken"))


@pytest.mark.first
def test_a_cut_link_is_an_error_and_the_job_goes_on_when_it_is_back(unbroken, tmp_path):
    """The rank that is left raises after parallel.timeout; Slurm gives up the host after 30 s."""
    folder = project_folder(tmp_path / "project")
    with (
        Cluster() as own,  # no other job may be on it
        Job(
            own, with_settings(folder, TEMPLATES["srun"][0], "parallel.timeout=10"), cwd=folder
        ) as job,
    ):
        job.wait_for("step_000000")
        cut = own.do("on", "node2", "ip", "link", "set", "eth0", "down")
        assert cut.code == 0, cut.stderr
        job.wait_for("[rank0]: RuntimeError: ", timeout=20)
        # Of several waits in flight, the first one times out, which closes the connection.
        assert re.search("Timed out waiting 10000ms|Application timeout", job.text()), job.text()
        job.wait_until("PENDING", timeout=60)  # for a host that fails, Slurm requeues
        assert "Node failure on node2" in job.text()
        joined = own.do("on", "node2", "ip", "link", "set", "eth0", "up")
        assert joined.code == 0, joined.stderr
        # Not start_again: Slurm's two minutes are for the orders to end the first run, which come
        # late to the host and would end the second.
        job.wait_until("RUNNING", timeout=300)
        check_goes_on(job, folder, unbroken(2))
