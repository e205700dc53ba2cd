"""Every row of the table in docs/slurm.md: each test produces the symptom and applies the fix."""

import re
import sys

import pytest
from harness import ROOT, SCRIPTS, Running
from slurm_cluster import Job

pytestmark = pytest.mark.slurm
PAGE = (ROOT / "docs" / "slurm.md").read_text()
TWO = ["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
MEET = """
from datetime import timedelta
from ddp_ref import cleanup_ddp, initialize_ddp
info = initialize_ddp(timedelta(seconds=15))
print(f"rank {info.rank} of {info.world_size} is local rank {info.local_rank}")
cleanup_ddp()
"""
RANK = [sys.executable, "-c", MEET]


def shown(text):
    """Return `text`, after checking that the page contains it: readers search for it there."""
    assert text in PAGE, text
    return text


def srun(cluster, *command, cwd, **variables):
    assigned = [f"{name}={value}" for name, value in variables.items()]
    return cluster.run("env", *assigned, "srun", *command, cwd=cwd)


def test_the_page_names_these_tests():
    here = {name for name in globals() if name.startswith("test_")}
    named = {*re.findall(r"test_slurm_symptoms.py::(\w+)", PAGE)}
    assert named == here - {"test_the_page_names_these_tests"}


def test_a_script_in_the_shell_of_one_task_waits_for_the_other_tasks(cluster, tmp_path):
    """Imitate `srun --pty bash`: only the first task gets the shell in which the script runs."""
    only_the_first = '[ "$SLURM_PROCID" = 0 ] || exit 0; exec "$@"'
    shell = ["bash", "-c", only_the_first, "shell", *RANK]
    ended = srun(cluster, "--nodes=1", "--ntasks=2", *shell, cwd=tmp_path)
    assert ended.code != 0 and shown("rank 1 did not arrive") in ended.stderr
    ended = srun(cluster, "--nodes=1", "--ntasks=1", *shell, cwd=tmp_path)
    assert ended.stdout == "rank 0 of 1 is local rank 0\n", ended.stderr


def test_the_only_gpu_of_a_task_has_index_0(cluster, tmp_path):
    """A task sees only the GPUs that Slurm puts in CUDA_VISIBLE_DEVICES. The first has index 0."""
    see = ["bash", "-c", 'echo "$SLURM_LOCALID sees $CUDA_VISIBLE_DEVICES"']
    flags = ["--nodes=1", "--ntasks=2"]
    ended = srun(cluster, *flags, shown("--gpus-per-task=1"), *see, cwd=tmp_path)
    assert sorted(ended.stdout.splitlines()) == ["0 sees 0", "1 sees 1"]
    ended = srun(cluster, *flags, shown("--gpus-per-node=2"), *see, cwd=tmp_path)
    assert sorted(ended.stdout.splitlines()) == ["0 sees 0,1", "1 sees 0,1"]


@pytest.mark.parametrize("name", ["ib7", "^lo"])
def test_an_interface_that_is_not_there(cluster, name, tmp_path):
    ended = srun(cluster, *TWO, *RANK, cwd=tmp_path, GLOO_SOCKET_IFNAME=name)
    assert ended.code != 0 and f"{shown('Unable to find address for:')} {name}" in ended.stderr


def test_a_name_that_resolves_to_localhost(cluster, tmp_path):
    """Debian writes such a line into /etc/hosts. gloo then gives the other ranks 127.0.1.1."""
    (tmp_path / "as_debian").write_text(
        "hosts=$(grep -v $(hostname) /etc/hosts)\n"
        'echo "$hosts" > hosts.$(hostname); echo "127.0.1.1 $(hostname)" >> hosts.$(hostname)\n'
        "exec unshare --mount bash -c "
        '\'mount --bind hosts.$(hostname) /etc/hosts; exec "$@"\' x "$@"\n'
    )
    command = [*TWO, "bash", "as_debian", *RANK]
    ended = srun(cluster, *command, cwd=tmp_path)
    assert ended.code != 0 and shown("remote=[127.0.") in ended.stderr, ended.stderr
    ended = srun(cluster, *command, cwd=tmp_path, GLOO_SOCKET_IFNAME="eth0")
    assert ended.code == 0 and "rank 1 of 2" in ended.stdout, ended.stderr


def test_a_master_that_resolves_to_localhost(cluster, tmp_path):
    """`hostname --ip-address` prints this address on such a host."""
    ended = srun(cluster, *TWO, *RANK, cwd=tmp_path, MASTER_ADDR="127.0.1.1", MASTER_PORT="29500")
    assert ended.code != 0 and shown("master at 127.0.1.1") in ended.stderr
    assert shown("Connection refused") in ended.stderr


def test_a_port_in_use(cluster, tmp_path):
    """Another job has the same MASTER_PORT. Without MASTER_PORT, each step gets its own port."""
    listen = "import socket, time; taken = socket.create_server(('', 29700)); print('listens')"
    taken = cluster.on("node1", sys.executable, "-c", f"{listen}; time.sleep(100)")
    with Running(*taken, cwd=tmp_path) as other:
        other.wait_for("listens")
        ended = srun(cluster, *TWO, *RANK, cwd=tmp_path, MASTER_PORT="29700")
        assert ended.code != 0 and shown("EADDRINUSE") in ended.stderr
        ended = srun(cluster, *TWO, *RANK, cwd=tmp_path)
        assert ended.code == 0 and "rank 1 of 2" in ended.stdout, ended.stderr


def test_a_torchrun_in_each_task_is_a_separate_training(cluster, tmp_path):
    """Two tasks start two torchruns with two ranks each, not one training with four ranks."""
    (tmp_path / "rank.py").write_text(MEET)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=2", "rank.py"]
    for tasks in (1, 2):
        ended = srun(cluster, "--nodes=1", f"--ntasks={tasks}", *torchrun, cwd=tmp_path)
        assert ended.stdout.count("rank 0 of 2") == tasks, ended.stderr


def test_the_batch_shell_expands_variables_to_its_own_node(cluster, tmp_path):
    """The batch shell expands an unquoted variable. In quotes, a shell on each node expands it."""
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\nsrun echo node rank $SLURM_NODEID\n"
        "srun bash -c 'echo its node rank $SLURM_NODEID'\n"
    )
    with Job(cluster, "--nodes=2", "--ntasks-per-node=1", "job.sh", cwd=tmp_path) as job:
        job.wait_until("COMPLETED", "FAILED")
    lines = sorted(re.findall(r"^(?!srun: ).+", job.text(), re.M))  # without srun's messages
    assert lines == ["its node rank 0", "its node rank 1", "node rank 0", "node rank 0"]


def test_tasks_that_are_not_spread_evenly(cluster, tmp_path):
    show = ["bash", "-c", "echo $SLURM_STEP_TASKS_PER_NODE"]
    flags = ["--nodes=2", "--ntasks=4"]
    ended = srun(cluster, *flags, *show, cwd=tmp_path)
    assert set(ended.stdout.split()) == {shown("3,1")}
    ended = srun(cluster, *flags, shown("--ntasks-per-node=2"), *show, cwd=tmp_path)
    assert set(ended.stdout.split()) == {"2(x2)"}


def test_a_directive_below_a_command_is_ignored(cluster, tmp_path):
    """sbatch stops reading directives at the first command, without a message."""
    lines = ["#!/bin/bash", "#SBATCH --nodes=2", "hostname", "#SBATCH --job-name=below"]
    (tmp_path / "job.sh").write_text("\n".join(lines) + "\n")
    with Job(cluster, "job.sh", cwd=tmp_path) as job:
        fields = job.wait_until("COMPLETED", "FAILED")
    assert (fields["NumNodes"], fields["JobName"]) == ("2", "job.sh")
    for template in (SCRIPTS / "slurm").glob("*_job.sh"):
        head, _, body = template.read_text().partition("\nPYTHON=")
        assert "#SBATCH --time" in head and "#SBATCH" not in body


def test_a_requeued_job_waits_and_may_lose_its_log(cluster, tmp_path):
    """It waits about two minutes. Without --open-mode=append, the new run overwrites the log."""
    (tmp_path / "job.sh").write_text("#!/bin/bash\necho run $SLURM_RESTART_COUNT; sleep 60\n")
    logs = {}
    for mode in ("truncate", "append"):
        with Job(cluster, f"--open-mode={mode}", "job.sh", cwd=tmp_path) as job:
            job.wait_for("run")
            cluster.control("requeue", job.id)
            fields = job.wait_until("PENDING")
            assert fields["Reason"] == shown("BeginTime")
            job.start_again()
            job.wait_for("run 1")
            logs[mode] = len(re.findall(r"^run", job.text(), re.MULTILINE))
    assert logs == {"truncate": 1, "append": 2} and shown("--open-mode=append")
