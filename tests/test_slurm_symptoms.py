"""Symptoms of ddp_ref's ranks in docs/slurm.md: each test produces one and applies the fix."""

import sys

import pytest
from harness import ROOT, Running

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


def test_a_script_in_the_shell_of_one_task_waits_for_the_other_tasks(cluster, tmp_path):
    """Imitate `srun --pty bash`: only the first task gets the shell in which the script runs."""
    only_the_first = '[ "$SLURM_PROCID" = 0 ] || exit 0; exec "$@"'
    shell = ["bash", "-c", only_the_first, "shell", *RANK]
    ended = srun(cluster, "--nodes=1", "--ntasks=2", *shell, cwd=tmp_path)
    assert ended.code != 0 and shown("rank 1 did not arrive") in ended.stderr
    ended = srun(cluster, "--nodes=1", "--ntasks=1", *shell, cwd=tmp_path)
    assert ended.stdout == "rank 0 of 1 is local rank 0\n", ended.stderr


def test_an_interface_that_is_not_there(cluster, tmp_path):
    ended = srun(cluster, *TWO, *RANK, cwd=tmp_path, GLOO_SOCKET_IFNAME="^lo")
    assert ended.code != 0 and f"{shown('Unable to find address for:')} ^lo" in ended.stderr


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
