"""Real Slurm: every way to start ddp_ref's ranks, and the three job templates, edited or not."""

import re
import shlex
import sys

import pytest
from harness import SCRIPTS
from slurm_cluster import Job, assert_close, edited, project_folder, trained_here, weights

pytestmark = pytest.mark.slurm
EPOCHS = 3
JOB = [sys.executable, SCRIPTS / "train_reference.py", str(EPOCHS)]
TWO_HOSTS = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]


def check_ended(ended, folder, world_size):
    """Check that the ranks trained together: one process with the whole batch has equal weights."""
    assert ended.code == 0, ended.stderr
    expected = trained_here("train_reference", EPOCHS, batch_size=32 * world_size)
    assert_close(weights(folder), expected)


def test_srun(cluster, tmp_path):
    flags = ["--nodes=2", "--ntasks=4", "--distribution=plane=3"]  # three on a host and one
    ended = cluster.run("srun", *flags, *JOB, cwd=tmp_path)
    check_ended(ended, tmp_path, world_size=4)


def test_a_step_on_the_second_host_only(cluster, tmp_path):
    """Rank 0 is not on the job's first host, so the ranks must meet on the step's first host."""
    step = ["srun", "--nodes=1", "--ntasks=2", "--nodelist=node2"]
    ended = cluster.run("salloc", *TWO_HOSTS, *step, *JOB, cwd=tmp_path)
    check_ended(ended, tmp_path, world_size=2)


def test_without_srun_it_is_one_process(cluster, tmp_path):
    """SLURM_NTASKS is 4, but nothing has started four processes."""
    job = shlex.join(map(str, JOB))
    ended = cluster.run("sbatch", "--wait", *TWO_HOSTS, f"--wrap={job}", cwd=tmp_path)
    check_ended(ended, tmp_path, world_size=1)


@pytest.mark.parametrize(
    ("template", "ranks", "ladder"),
    [
        ("single_node_multiple_gpu", 2, []),
        ("multiple_nodes_single_gpu", 2, []),
        ("multiple_nodes_multiple_gpu", 4, []),
        ("multiple_nodes_multiple_gpu", 4, ["scripts/multinode_slurm.py", str(EPOCHS)]),
    ],
)
def test_template(cluster, template, ranks, ladder, tmp_path):
    """Without any edit, its ranks train together. So does the script that follows its name."""
    folder = project_folder(tmp_path / "project")
    with Job(cluster, f"scripts/slurm/{template}_slurm_job.sh", *ladder, cwd=folder) as batch:
        fields = batch.wait_until("COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0", batch.text()
    assert re.search(r"test accuracy 0\.[89]", batch.text())
    program, epochs = ("the ladder", EPOCHS) if ladder else ("train_reference", 20)
    assert_close(weights(folder), trained_here(program, epochs, batch_size=32 * ranks))


def test_template_on_hosts_whose_names_resolve_to_localhost(cluster, tmp_path):
    """The template tells torchrun the host's name in Slurm; INTERFACE tells gloo the interface.

    Otherwise both would announce localhost, and the other host could not connect.
    """
    folder = project_folder(tmp_path / "project")
    (folder / "python").write_text(
        "#!/bin/bash\n"
        '{ echo "127.0.0.1 localhost $(hostname)"; grep -v "$(hostname)" /etc/hosts; } > hosts.$$\n'
        "exec unshare --mount bash -c 'mount --bind $0 /etc/hosts; exec .venv/bin/python \"$@\"'"
        ' hosts.$$ "$@"\n'
    )
    (folder / "python").chmod(0o755)
    template = edited(
        folder,
        "multiple_nodes_multiple_gpu_slurm_job.sh",
        "INTERFACE= ",
        f"INTERFACE=eth0; TRAIN=(scripts/train_reference.py {EPOCHS} 5) ",
    )
    with Job(cluster, "--export=ALL,PYTHON=./python", template, cwd=folder) as batch:
        fields = batch.wait_until("COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0", batch.text()
    assert_close(weights(folder), trained_here("train_reference", EPOCHS, batch_size=128))
