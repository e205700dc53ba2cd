"""local_cluster.sh: `up` starts a cluster, `down` leaves nothing behind, mistakes are one line."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from harness import Running, clean_environment
from slurm_cluster import LOCAL_CLUSTER, Cluster, run_unwatched

pytestmark = pytest.mark.slurm
NOBODY = 65534


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
        # Variables of another cluster change what sinfo reports.
        theirs = {"SINFO_PARTITION": "gpu", "SLURM_CLUSTERS": "theirs"}
        assert own.do("status", env=theirs).stdout.count("idle") == 2
        command = ["srun", "--nodes=2", "bash", "-c", "echo $(hostname); trap '' TERM; sleep 100"]
        salloc = ["salloc", "bash", "-c", "echo in an allocation; sleep 100"]
        with (
            Running(*command, cwd=tmp_path, env=own.env) as job,
            Running(*salloc, cwd=tmp_path, env=own.env) as shell,
        ):
            for host in ("node1", "node2"):
                job.wait_for(host)
            shell.wait_for("in an allocation")
            assert own.do("down").code == 0
            job.wait(timeout=5)  # neither client may leave a process behind
            shell.wait(timeout=5)
    finally:
        own.do("down")
    assert not own.state.exists()
    assert own.name not in psutil.net_if_addrs()
    assert mounts() == mounted and own.name not in Path("/proc/self/mounts").read_text()
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in commands if own.name in " ".join(words)]


def test_an_up_that_cannot_be_leaves_nothing_behind_and_others_alone(cluster):
    """The first two want another cluster's network and an interface's name; the last is wrong."""
    second, third, last = Cluster(), Cluster(), Cluster()
    second.net, last.net = cluster.net, "999.1.1"
    subprocess.run(["ip", "link", "add", third.name, "type", "veth"], check=True)
    try:
        for own, says in (
            (second, f"error: {cluster.net}.0/24 is in use here"),
            (third, f"error: there is an interface {third.name} here"),
            (last, "999.1.1"),
        ):
            ended = own.do("up")
            assert ended.code != 0 and says in ended.stderr and not own.state.exists()
            assert len(ended.stderr.splitlines()) == 1 or own is last
            assert own.do("down").code == 0
            assert (own.name in psutil.net_if_stats()) == (own is third)
        assert cluster.do("status").code == 0
    finally:
        subprocess.run(["ip", "link", "delete", third.name], check=True)


def test_a_mistake_is_one_line():
    for name, verb, line in (
        ("../etc", "down", "LOCAL_CLUSTER must be 1 to 15 of a-z, 0-9 and -, not '../etc'"),
        ("ddp-test", "on", "local_cluster.sh needs one of: up, down, status, on HOST COMMAND..."),
    ):
        ended = run_unwatched(LOCAL_CLUSTER, verb, env={"LOCAL_CLUSTER": name})
        assert (ended.code, ended.stdout, ended.stderr) == (1, "", f"error: {line}\n")


def test_without_root_it_says_what_to_do(cluster):
    """Without root you can still use a running cluster. Jobs run as the user who submits them."""

    def as_nobody(*command, **env):
        return subprocess.run(
            command,
            env=clean_environment() | env,
            user=NOBODY,
            cwd="/",
            input=LOCAL_CLUSTER.read_text(),
            capture_output=True,
            text=True,
            timeout=30,
        )

    ended = as_nobody("bash", "-s", "up", LOCAL_CLUSTER="ddp-none")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "error: namespaces need root: put sudo before the command\n"
    ended = as_nobody("bash", "-s", "up", LOCAL_CLUSTER=cluster.name)
    assert ended.returncode == 0 and "already up" in ended.stdout, ended.stderr
    ended = as_nobody("srun", "--nodes=2", "id", "--user", **cluster.env)
    assert ended.stdout.split() == [str(NOBODY)] * 2, ended.stderr


def test_missing_packages_are_named():
    hidden = 'mount -t tmpfs none /usr/sbin && exec "$@"'
    up = ["bash", "-c", hidden, "x", LOCAL_CLUSTER, "up"]
    ended = run_unwatched("unshare", "--mount", *up, env={"LOCAL_CLUSTER": "ddp-none"})
    assert ended.code == 1 and len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("error: no slurmctld slurmd munged")
    assert "sudo apt-get install slurm-wlm munge" in ended.stderr
