"""local_cluster.sh: `up` starts a cluster, and `down` leaves nothing behind."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from harness import Running
from slurm_cluster import LOCAL_CLUSTER, Cluster, run_unwatched

pytestmark = pytest.mark.slurm


def mounts():
    """Return all mounts except those of clusters, because other tests may have one up."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if "local-cluster-" not in line]


def test_two_ups_at_once_and_down_in_the_middle_of_a_job(tmp_path):
    """`down` leaves no process, interface, mount, namespace or file, and ends all its clients."""
    own = Cluster()
    mounted = mounts()
    assert own.do("down").code == 0 and own.do("status").code == 1
    try:
        with ThreadPoolExecutor(2) as pool:
            started = list(pool.map(own.do, ["up", "up"]))
        assert [ended.code for ended in started] == [0, 0], started
        assert all(f"export SLURM_CONF={own.state}/slurm.conf" in s.stdout for s in started)
        assert sum("already up" in ended.stdout for ended in started) == 1
        assert own.do("status").stdout.count("idle") == 2
        command = ["srun", "--nodes=2", "bash", "-c", "echo $(hostname); trap '' TERM; sleep 100"]
        with Running(*command, cwd=tmp_path, env=own.env) as job:
            for host in ("node1", "node2"):
                job.wait_for(host)
            assert own.do("down").code == 0
            job.wait(timeout=5)  # the client may leave no process behind
    finally:
        own.do("down")
    assert not own.state.exists()
    assert own.name not in psutil.net_if_addrs()
    assert mounts() == mounted and own.name not in Path("/proc/self/mounts").read_text()
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in commands if own.name in " ".join(words)]


def test_an_up_in_another_clusters_network_leaves_that_cluster_alone(cluster):
    own = Cluster()
    own.net = cluster.net
    ended = own.do("up")
    assert ended.code != 0 and f"error: {own.net}.0/24 is in use here" in ended.stderr
    assert own.do("down").code == 0 and not own.state.exists()
    assert cluster.do("status").code == 0


def test_a_name_is_no_path():
    """`down` removes the folder of that name."""
    ended = run_unwatched(LOCAL_CLUSTER, "down", env={"LOCAL_CLUSTER": "../etc"})
    assert ended.code == 1 and "of a-z, 0-9 and -, not '../etc'" in ended.stderr
