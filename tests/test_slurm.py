"""Real Slurm: every way to start ranks, and the three job templates, edited or not."""

import re
import shlex
import sys

import pytest
from harness import SCRIPTS
from slurm_cluster import Job, assert_close, edited, one_process, project_folder, weights

pytestmark = pytest.mark.slurm
EPOCHS = 3
DIGITS = SCRIPTS / "configs" / "digits.yaml"
JOBS = {
    "multinode_slurm": [SCRIPTS / "multinode_slurm.py", "--epochs", str(EPOCHS)],
    "train_reference": [
        *(SCRIPTS / "train_reference.py", "--config", DIGITS),
        *("--set", f"training.num_epochs={EPOCHS}"),
    ],
}
TWO_HOSTS = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    return tmp_path_factory.mktemp("references")


@pytest.fixture(params=JOBS)
def job(request):
    """Return the command of a script that does the digits job."""
    return [sys.executable, *JOBS[request.param]]


def places(text):
    """Return the host and local rank of each rank, as multinode_slurm.py prints them."""
    matches = re.findall(r"rank (\d+) is local rank (\d+) on (\w+), cpu", text)
    return {int(rank): (host, int(local_rank)) for rank, local_rank, host in matches}


def check_ended(ended, folder, references, world_size):
    """Check that the ranks trained together: one process with the whole batch has equal weights."""
    assert ended.code == 0, ended.stderr
    assert_close(weights(folder), one_process(references, 32 * world_size, EPOCHS))


@pytest.mark.parametrize(
    ("flags", "ranks_on"),
    [
        pytest.param(TWO_HOSTS, "1122", id="two-by-two"),
        pytest.param([*TWO_HOSTS, "--gpus-per-task=1"], "1122", id="one-gpu-a-task"),
        pytest.param(
            ["--nodes=2", "--ntasks=4", "--distribution=plane=3"], "1112", id="three-and-one"
        ),
        pytest.param([*TWO_HOSTS, "--distribution=cyclic"], "1212", id="in-turns"),
    ],
)
def test_srun(cluster, references, job, flags, ranks_on, tmp_path):
    ended = cluster.run("srun", *flags, *job, cwd=tmp_path)
    check_ended(ended, tmp_path, references, world_size=4)
    if printed := places(ended.stdout):
        expected = [f"node{number}" for number in ranks_on]
        assert [printed[rank][0] for rank in range(4)] == expected
        for rank, (host, local_rank) in printed.items():
            assert local_rank == expected[:rank].count(host)


def test_a_step_on_the_second_host_only(cluster, references, job, tmp_path):
    """Rank 0 is not on the job's first host, so the ranks must meet on the step's first host."""
    step = ["srun", "--nodes=1", "--ntasks=2", "--nodelist=node2"]
    ended = cluster.run("salloc", *TWO_HOSTS, *step, *job, cwd=tmp_path)
    check_ended(ended, tmp_path, references, world_size=2)
    assert {host for host, _ in places(ended.stdout).values()} <= {"node2"}


def test_two_steps_at_once(cluster, references, job, tmp_path):
    """The ranks of both steps meet on the same host, but on different ports."""
    step = "srun --exact --nodes=2 --ntasks=2 --chdir"
    command = shlex.join(map(str, job))
    lines = ["#!/bin/bash", "status=0"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        lines.append(f"{step} {name} {command} & {name}=$!")
    lines += ["wait $one || status=1", "wait $two || status=1", "exit $status"]
    (tmp_path / "steps.sh").write_text("\n".join(lines))
    with Job(cluster, *TWO_HOSTS, tmp_path / "steps.sh", cwd=tmp_path) as batch:
        state = batch.wait_until("COMPLETED", "FAILED")["JobState"]
        assert state == "COMPLETED", batch.text()
        assert "step creation temporarily disabled" not in batch.text()  # else they ran one by one
    for name in ("one", "two"):
        assert_close(weights(tmp_path / name), one_process(references, 64, EPOCHS))


def test_a_batch_script_without_srun_is_one_process(cluster, references, job, tmp_path):
    """SLURM_NTASKS is 4 in it, but nothing has started four processes."""
    wrapped = f"--wrap={shlex.join(map(str, job))}"
    with Job(cluster, *TWO_HOSTS, wrapped, cwd=tmp_path) as batch:
        state = batch.wait_until("COMPLETED", "FAILED")["JobState"]
        assert state == "COMPLETED", batch.text()
    assert_close(weights(tmp_path), one_process(references, 32, EPOCHS))


@pytest.mark.parametrize("where", ["command", "shell"])
def test_an_interactive_allocation_is_one_process(cluster, references, job, where, tmp_path):
    """This holds for salloc's command, which runs on this machine, and for its shell on node1."""
    command = ["salloc", *TWO_HOSTS, *job]
    if where == "shell":
        typed = f"cd {tmp_path}; {shlex.join(map(str, job))}; hostname; exit"
        salloc = f"echo {shlex.quote(typed)} | script -qec {shlex.quote(shlex.join(command[:4]))}"
        # salloc opens $SHELL. A terminal sets it, but CI may not.
        command = ["env", "SHELL=/bin/bash", "bash", "-c", f"{salloc} /dev/null"]
    ended = cluster.run(*command, cwd=tmp_path)
    check_ended(ended, tmp_path, references, world_size=1)
    assert ("\nnode1" in ended.stdout) == (where == "shell")


def test_torchrun_under_srun(cluster, references, job, tmp_path):
    """One task per node, with c10d: torchrun's variables take precedence over the step's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400"]
    ended = cluster.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", *torchrun, *job[1:], cwd=tmp_path
    )
    check_ended(ended, tmp_path, references, world_size=4)


@pytest.mark.parametrize(
    ("template", "ranks"),
    [
        ("single_node_multiple_gpu_slurm_job.sh", 2),
        ("multiple_nodes_single_gpu_slurm_job.sh", 2),
        ("multiple_nodes_multiple_gpu_slurm_job.sh", 4),
    ],
)
def test_template(cluster, references, template, ranks, tmp_path):
    """Without any edit, it runs to its end, and its ranks train together."""
    folder = project_folder(tmp_path / "project")
    with Job(cluster, f"scripts/slurm/{template}", cwd=folder) as batch:
        fields = batch.wait_until("COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0", batch.text()
    assert re.search(r"test accuracy 0\.9[67]\d\d", batch.text())
    assert_close(weights(folder), one_process(references, 32 * ranks, 20))


def test_template_on_hosts_whose_names_resolve_to_localhost(cluster, references, tmp_path):
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
        f"INTERFACE=eth0; PYTHON=./python; TRAIN+=(training.num_epochs={EPOCHS}) ",
    )
    with Job(cluster, template, cwd=folder) as batch:
        fields = batch.wait_until("COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0", batch.text()
    assert_close(weights(folder), one_process(references, 128, EPOCHS))


@pytest.mark.parametrize(
    ("before", "after", "state", "said"),
    [
        ("#SBATCH --gpus-per-node=2\n", "", "FAILED", "request GPUs in the header"),
        ("#SBATCH --cpus-per-task=8 ", "#SBATCH --cpus-per-gpu=2 ", "COMPLETED", "test accuracy"),
    ],
)
def test_template_with_an_edited_header(cluster, before, after, state, said, tmp_path):
    folder = project_folder(tmp_path / "project")
    template = edited(folder, "single_node_multiple_gpu_slurm_job.sh", before, after)
    with Job(cluster, template, cwd=folder) as batch:
        assert batch.wait_until("COMPLETED", "FAILED")["JobState"] == state, batch.text()
        assert said in batch.text()
