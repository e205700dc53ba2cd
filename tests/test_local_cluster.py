"""local_cluster.sh: `up` starts a cluster, `down` leaves nothing behind, mistakes are one line."""

import os
import signal
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


def test_the_hosts(cluster, tmp_path):
    """Each of the two hosts has its own name and address, and each task gets its own GPU."""
    command = "test -c $GPU$SLURM_LOCALID && "
    command += "echo $(hostname) $(getent ahostsv4 node2 | head -n 1) $CUDA_VISIBLE_DEVICES"
    flags = [
        "--nodes=2",
        "--ntasks-per-node=2",
        "--gpus-per-task=1",
        f"--export=ALL,GPU={cluster.state}/gpu",
    ]
    ended = cluster.run("srun", *flags, "bash", "-c", command, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    seen = [f"node{host} {cluster.net}.4 STREAM node2 {gpu}" for host in (1, 2) for gpu in (0, 1)]
    assert sorted(ended.stdout.splitlines()) == seen


def test_up_twice_and_down_in_the_middle_of_a_job(tmp_path):
    """`down` leaves no process, interface, mount, namespace or file, and ends all its clients."""
    own = Cluster()
    mounted = mounts()
    assert own.do("down").code == 0 and own.do("status").code == 1
    started = own.do("up")
    try:
        assert started.code == 0, started.stderr
        assert f"export SLURM_CONF={own.state}/slurm.conf" in started.stdout
        again = own.do("up")
        assert again.code == 0 and "already up" in again.stdout, again.stderr
        assert own.do("status").stdout.count("idle") == 2
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


@pytest.mark.parametrize("daemon", ["controller", "node2"])
def test_up_repairs_a_cluster_after_a_crash(daemon, tmp_path):
    with Cluster() as own:
        os.kill(int((own.state / daemon / "pid").read_text()), signal.SIGKILL)
        started = own.do("up")
        assert started.code == 0, started.stderr
        ended = own.run("srun", "--nodes=2", "hostname", cwd=tmp_path, timeout=30)
        assert sorted(ended.stdout.split()) == ["node1", "node2"], ended.stderr


def test_two_ups_at_once(tmp_path):
    """The second waits for the first and finds the cluster up, with the first one's daemons."""
    own = Cluster()
    try:
        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(own.do, ["up", "up"]))
        assert [result.code for result in ended] == [0, 0], ended
        starts = (own.state / "controller" / "log").read_text().count("Running as primary")
        assert starts == 1
        assert own.run("srun", "--nodes=2", "hostname", cwd=tmp_path).code == 0
    finally:
        own.do("down")


def test_a_machine_that_mounts_run_with_noexec():
    """Debian mounts /run with noexec. The umask is that of a careful administrator."""
    own = Cluster()
    script = f"""
        umask 077
        mount -t tmpfs -o nosuid,nodev,noexec none /run
        {LOCAL_CLUSTER} up || exit
        export SLURM_CONF={own.state}/slurm.conf
        cd "$(mktemp -d)"
        sbatch --wait --output=log --wrap "echo ran"; cat log
        {LOCAL_CLUSTER} down
        find /run -name '*cluster*' """
    ended = run_unwatched("unshare", "--mount", "bash", "-c", script, env=own.names)
    assert ended.code == 0, ended.stderr
    assert "\nran\n" in ended.stdout and ended.stdout.splitlines()[-1].startswith(own.name)


def test_the_users_slurm_variables_are_ignored(cluster):
    """They change what sinfo reports. If a cluster then looked down, `up` would build it again."""
    theirs = {"SINFO_PARTITION": "gpu", "SLURM_CLUSTERS": "theirs"}
    assert cluster.do("status", env=theirs).code == 0


def test_an_interface_with_the_clusters_name(cluster):
    """The interface is somebody else's: `up` creates nothing, and `down` does not delete it."""
    other = Cluster()
    subprocess.run(["ip", "link", "add", other.name, "type", "veth"], check=True)
    try:
        ended = other.do("up")
        assert ended.code == 1 and f"there is an interface {other.name} here" in ended.stderr
        assert other.do("down").code == 0 and other.name in psutil.net_if_stats()
    finally:
        subprocess.run(["ip", "link", "delete", other.name], check=True)


def test_a_network_that_is_in_use(cluster, tmp_path):
    """A second cluster in the first one's network is refused, and the first keeps working."""
    second = Cluster()
    second.net = cluster.net
    ended = second.do("up")
    assert ended.code == 1 and f"error: {cluster.net}.0/24 is in use here" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and not second.state.exists()
    assert second.do("down").code == 0
    assert cluster.run("srun", "--nodes=2", "hostname", cwd=tmp_path).code == 0


def test_a_failed_up_leaves_nothing_behind():
    own = Cluster()
    own.net = "999.1.1"
    ended = own.do("up")
    assert ended.code != 0 and "999.1.1" in ended.stderr
    assert not own.state.exists() and own.name not in psutil.net_if_addrs()


@pytest.mark.parametrize(
    ("name", "net", "verb", "line"),
    [
        ("../etc", "10.213.8", "down", "LOCAL_CLUSTER must be 1 to 15 of a-z, 0-9 and -"),
        ("ddp-test", "10.213", "up", "LOCAL_CLUSTER_NET must be three numbers"),
        ("ddp-test", "127.0.1", "up", "LOCAL_CLUSTER_NET must be three numbers"),
        ("ddp-test", "10.213.8", "start", "local_cluster.sh needs one of: up, down, status, on"),
        ("ddp-test", "10.213.8", "on", "local_cluster.sh needs one of: up, down, status, on"),
    ],
)
def test_a_mistake_is_one_line(name, net, verb, line):
    own = Cluster()
    own.name, own.net = name, net
    ended = own.do(verb)
    assert ended.code == 1 and ended.stderr.startswith(f"error: {line}"), ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and not ended.stdout


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

    for verb in ("up", "down"):
        ended = as_nobody("bash", "-s", verb, LOCAL_CLUSTER="ddp-none")
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
