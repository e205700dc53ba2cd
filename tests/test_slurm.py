"""Real Slurm: every way to start ddp_ref's ranks, and the three job templates, edited or not."""

import re
import shlex
import sys

import pytest
from harness import SCRIPTS
from slurm_cluster import (
    DIGITS,
    Job,
    assert_close,
    edited,
    one_process,
    project_folder,
    weights,
)

pytestmark = pytest.mark.slurm
EPOCHS = 3
JOB = [sys.executable, SCRIPTS / "train_reference.py", "--config", DIGITS]
JOB += ["--set", f"training.num_epochs={EPOCHS}"]
TWO_HOSTS = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    return tmp_path_factory.mktemp("references")


def check_ended(ended, folder, references, world_size):
    """Check that the ranks trained together: one process with the whole batch has equal weights."""
    assert ended.code == 0, ended.stderr
    expected = one_process(references, "train_reference", 32 * world_size, EPOCHS)
    assert_close(weights(folder), expected)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(TWO_HOSTS, id="two-by-two"),
        pytest.param([*TWO_HOSTS, "--gpus-per-task=1"], id="one-gpu-a-task"),
        pytest.param(["--nodes=2", "--ntasks=4", "--distribution=plane=3"], id="three-and-one"),
        pytest.param([*TWO_HOSTS, "--distribution=cyclic"], id="in-turns"),
    ],
)
def test_srun(cluster, references, flags, tmp_path):
    ended = cluster.run("srun", *flags, *JOB, cwd=tmp_path)
    check_ended(ended, tmp_path, references, world_size=4)


def test_a_step_on_the_second_host_only(cluster, references, tmp_path):
    """Rank 0 is not on the job's first host, so the ranks must meet on the step's first host."""
    step = ["srun", "--nodes=1", "--ntasks=2", "--nodelist=node2"]
    ended = cluster.run("salloc", *TWO_HOSTS, *step, *JOB, cwd=tmp_path)
    check_ended(ended, tmp_path, references, world_size=2)


def test_two_steps_at_once(cluster, references, tmp_path):
    """The ranks of both steps meet on the same host, but on different ports."""
    step = "srun --exact --nodes=2 --ntasks=2 --chdir"
    command = shlex.join(map(str, JOB))
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
        expected = one_process(references, "train_reference", 64, EPOCHS)
        assert_close(weights(tmp_path / name), expected)


def test_a_batch_script_without_srun_is_one_process(cluster, references, tmp_path):
    """SLURM_NTASKS is 4 in it, but nothing has started four processes."""
    wrapped = f"--wrap={shlex.join(map(str, JOB))}"
    with Job(cluster, *TWO_HOSTS, wrapped, cwd=tmp_path) as batch:
        state = batch.wait_until("COMPLETED", "FAILED")["JobState"]
        assert state == "COMPLETED", batch.text()
    assert_close(weights(tmp_path), one_process(references, "train_reference", 32, EPOCHS))


@pytest.mark.parametrize("where", ["command", "shell"])
def test_an_interactive_allocation_is_one_process(cluster, references, where, tmp_path):
    """This holds for salloc's command, which runs on this machine, and for its shell on node1."""
    command = ["salloc", *TWO_HOSTS, *JOB]
    if where == "shell":
        typed = f"cd {tmp_path}; {shlex.join(map(str, JOB))}; hostname; exit"
        salloc = f"echo {shlex.quote(typed)} | script -qec {shlex.quote(shlex.join(command[:4]))}"
        # salloc opens $SHELL. A terminal sets it, but CI may not.
        command = ["env", "SHELL=/bin/bash", "bash", "-c", f"{salloc} /dev/null"]
    ended = cluster.run(*command, cwd=tmp_path)
    check_ended(ended, tmp_path, references, world_size=1)
    assert ("\nnode1" in ended.stdout) == (where == "shell")


def test_torchrun_under_srun(cluster, references, tmp_path):
    """One task per node, with c10d: torchrun's variables take precedence over the step's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400"]
    ended = cluster.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", *torchrun, *JOB[1:], cwd=tmp_path
    )
    check_ended(ended, tmp_path, references, world_size=4)


@pytest.mark.parametrize("program", ["train_reference", "the ladder"])
@pytest.mark.parametrize(
    ("template", "script", "ranks"),
    [
        ("single_node_multiple_gpu", "multigpu_torchrun", 2),
        ("multiple_nodes_single_gpu", "multinode_slurm", 2),
        ("multiple_nodes_multiple_gpu", "multinode_slurm", 4),
    ],
)
def test_template(cluster, references, template, script, ranks, program, tmp_path):
    """Without any edit, its ranks train together. So does the script that follows its name."""
    folder = project_folder(tmp_path / "project")
    command = [f"scripts/slurm/{template}_slurm_job.sh"]
    epochs = 20
    if program == "the ladder":
        epochs = EPOCHS
        command += [f"scripts/{script}.py", str(EPOCHS)]
    with Job(cluster, *command, cwd=folder) as batch:
        fields = batch.wait_until("COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0", batch.text()
    assert re.search(r"test accuracy 0\.[89]", batch.text())
    assert_close(weights(folder), one_process(references, program, 32 * ranks, epochs))


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
        f"INTERFACE=eth0; TRAIN+=(training.num_epochs={EPOCHS}) ",
    )
    with Job(cluster, "--export=ALL,PYTHON=./python", template, cwd=folder) as batch:
        fields = batch.wait_until("COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0", batch.text()
    assert_close(weights(folder), one_process(references, "train_reference", 128, EPOCHS))


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
