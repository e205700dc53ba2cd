"""Launch detection, and the first host of Slurm host lists, which scontrol confirms."""

import os
import shutil
from itertools import combinations

import pytest
from harness import run

from ddp_ref.launch import (
    MASTER_NAMES,
    RANK_NAMES,
    LaunchInfo,
    available_cores,
    cores_per_rank,
    detect_launch,
    first_host,
)

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "29400"}
# Copied from a task that Slurm 22.05 started with `srun --nodes=2 --ntasks=3` inside an sbatch.
STEP = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
# The batch script has these, too, and the interactive shell of salloc is a step of one task.
BATCH = {name: value for name, value in STEP.items() if "_STEP_" not in name}
BATCH |= {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}
INTERACTIVE = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "n1"}
INTERACTIVE |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
NEEDED = "SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_STEP_ID"


def test_torchrun_variables():
    assert detect_launch(TORCHRUN) == LaunchInfo(
        launcher="torchrun",
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        nnodes=2,
        master_addr="node7",
        master_port=29400,
        reason="RANK, LOCAL_RANK and WORLD_SIZE are set",
    )


def test_slurm_step():
    info = detect_launch(STEP)
    assert (info.launcher, info.rank, info.local_rank, info.world_size) == ("slurm", 2, 0, 3)
    assert (info.local_world_size, info.nnodes) == (1, 2)
    assert info.master_addr == "n3"  # of the step's nodes, not the job's
    assert 1023 < info.master_port < 32768  # Linux assigns ports from there on by itself
    assert detect_launch(STEP | {"LOCAL_WORLD_SIZE": "3"}) == info  # the step's own value counts


@pytest.mark.parametrize("environ", [{}, BATCH, INTERACTIVE, {"MASTER_PORT": "1"} | BATCH])
def test_one_process(environ):
    info = detect_launch(environ)
    assert (info.launcher, info.rank, info.world_size, info.nnodes) == ("none", 0, 1, 1)
    assert info.master_addr is info.master_port is None
    assert ("Slurm" in info.reason) == ("SLURM_JOB_ID" in environ)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"PMI_SIZE": "2", "PMI_RANK": "1"} | MASTER, "PMI_SIZE=2"),
        ({"MV2_COMM_WORLD_SIZE": "2"} | BATCH, "MV2_COMM_WORLD_SIZE=2"),
        (STEP | {"OMPI_COMM_WORLD_SIZE": "6"}, "OMPI_COMM_WORLD_SIZE=6"),  # its daemons are tasks
        (BATCH | MASTER | {"SLURM_PROCID": "2", "PMI_SIZE": "4"}, "PMI_SIZE=4, SLURM_PROCID=2"),
    ],
)
def test_one_of_several_processes_does_not_run_alone(environ, name):
    with pytest.raises(ValueError, match=f"^{name}: one of several processes[^\n]*$"):
        detect_launch(environ)
    assert detect_launch(environ, rank=0, world_size=2, master_addr="n1", master_port=1).rank == 0
    assert detect_launch(environ | TORCHRUN).launcher == "torchrun"


def test_precedence_of_the_launchers():
    assert detect_launch({"OMPI_COMM_WORLD_SIZE": "1"}).launcher == "none"
    assert detect_launch(STEP | {"PMI_SIZE": "3", "PMI_RANK": "2"}).launcher == "slurm"
    assert detect_launch(STEP | TORCHRUN).launcher == "torchrun"  # srun torchrun
    chosen = detect_launch(STEP | TORCHRUN, rank=3, world_size=7)
    assert (chosen.launcher, chosen.rank, chosen.world_size) == ("arguments", 3, 7)
    assert (chosen.local_rank, chosen.local_world_size) == (3, 7)  # TORCHRUN's are of 8 ranks


def test_arguments():
    info = detect_launch({}, rank=1, world_size=2, master_addr="localhost", master_port="29500")
    assert (info.local_rank, info.local_world_size, info.nnodes) == (1, 2, 1)
    assert (info.master_addr, info.master_port) == ("localhost", 29500)
    info = detect_launch(TORCHRUN, rank=6, world_size=8, master_port=1234)
    assert (info.rank, info.local_rank, info.local_world_size, info.nnodes) == (6, 1, 4, 2)
    assert (info.master_addr, info.master_port) == ("node7", 1234)  # one from each source
    assert detect_launch({}, rank=0, world_size=1).master_addr is None  # one rank needs no master
    assert detect_launch(STEP, master_addr="n9", master_port=7).master_addr == "n9"


def test_arguments_that_repeat_the_step():
    """After `rank=int(os.environ["SLURM_PROCID"])`, the step's variables supply the rest."""
    info = detect_launch(STEP, rank=2, world_size=3)
    step = detect_launch(STEP)
    assert (info.launcher, info.local_rank, info.local_world_size) == ("arguments", 0, 1)
    assert (info.nnodes, info.master_addr) == (2, "n3") and info.master_port == step.master_port
    info = detect_launch(STEP, rank=1, world_size=3, master_addr="n9", master_port=7)
    assert (info.local_rank, info.nnodes) == (1, 1)  # not this task's rank: the step is ignored
    info = detect_launch(STEP | TORCHRUN, rank=2, world_size=3)
    assert (info.local_rank, info.local_world_size) == (0, 1)  # TORCHRUN's are of 8 ranks


def test_empty_variable_is_not_set():
    assert detect_launch({"RANK": "", "MASTER_ADDR": "", "SLURM_STEP_NUM_TASKS": ""}).rank == 0


def test_local_world_size_and_nodes_without_their_variables():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    by_hand = {name: TORCHRUN[name] for name in names}
    assert detect_launch(by_hand).local_world_size == 8
    assert detect_launch(by_hand | {"LOCAL_WORLD_SIZE": "3"}).nnodes == 3
    step = {name: STEP[name] for name in STEP if not name.endswith(("_PER_NODE", "_NODEID"))}
    assert detect_launch(step).local_world_size == 3
    assert detect_launch(step | {"SLURM_TASKS_PER_NODE": "2,1"}).local_world_size == 2


@pytest.mark.parametrize("names", [RANK_NAMES, MASTER_NAMES])
def test_an_incomplete_set_of_variables_is_an_error(names):
    """Every incomplete set is an error that names exactly the missing variables."""
    base = {} if names == RANK_NAMES else {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for missing in [some for n in range(1, len(names)) for some in combinations(names, n)]:
        with pytest.raises(ValueError, match=f"^{', '.join(missing)} not set: "):
            detect_launch(base | {name: TORCHRUN[name] for name in {*names} - {*missing}})


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({}, {"rank": 0}, "rank=0 and world_size=None"),
        ({}, {"world_size": 2}, "rank=None and world_size=2"),
        ({}, {"rank": 0, "world_size": 2, "master_addr": "a"}, "^MASTER_PORT not set"),
        ({}, {"rank": -1, "world_size": 1}, "rank=-1"),
        ({"MASTER_PORT": "29500"}, {}, "MASTER_ADDR not set"),
        (BATCH | {"MASTER_ADDR": "n1"}, {}, "^MASTER_PORT not set"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, {}, f"^{NEEDED} not set"),
        (TORCHRUN | {"WORLD_SIZE": "2.0"}, {}, "WORLD_SIZE must be an integer, not '2.0'"),
        (TORCHRUN | {"RANK": "8"}, {}, r"^rank and world_size clash .*rank=8, .*world_size=8, "),
        (TORCHRUN | {"LOCAL_RANK": "4"}, {}, "^local_rank and local_world_size clash"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, {}, "^local_rank and local_world_size clash"),
        (TORCHRUN, {"master_port": 0}, "MASTER_PORT must be from 1 to 65535, not 0"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, {}, "from 1 to 65535, not 65536"),
        (STEP | {"SLURM_NODEID": "2"}, {}, "SLURM_NODEID=2 .*'2,1'"),
        (STEP | {"SLURM_NODEID": "-1"}, {}, "SLURM_NODEID=-1"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1(x"}, {}, r"SLURM_NODEID=1 .*'2,1\(x'"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1"}, {}, r"malformed host list 'n\[1': "),
        (STEP | {"MASTER_ADDR": "n1"}, {}, "^MASTER_PORT not set"),
    ],
)
def test_invalid_launches_are_refused(environ, arguments, message):
    with pytest.raises(ValueError, match=message):
        detect_launch(environ, **arguments)


def test_tasks_per_node():
    for node, local in enumerate([1, 2, 2, 1, 1]):
        changed = {"SLURM_STEP_TASKS_PER_NODE": "1,2(x2),1(x2)", "SLURM_NODEID": str(node)}
        info = detect_launch(STEP | changed | {"SLURM_STEP_NUM_TASKS": "7"})
        assert (info.local_world_size, info.nnodes) == (local, 5)


def test_ports_of_steps():
    """The steps of a job use different ports, and so do the first steps of consecutive jobs."""

    def port(job: int, step: int) -> int | None:
        launch = detect_launch(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        return launch.master_port

    assert len({port(123456, step) for step in range(1000)}) == 1000
    assert len({port(job, step) for job in range(900_000, 900_100) for step in range(10)}) == 1000
    assert detect_launch(STEP | {"MASTER_PORT": "4321"}).master_port == 4321
    both = detect_launch(STEP | {"MASTER_ADDR": "n4", "MASTER_PORT": "4321"})
    assert (both.master_addr, both.master_port) == ("n4", 4321)


def test_cores_per_rank(monkeypatch):
    """A rank's share is the available cores divided by the number of ranks on this node.

    Under Slurm it is the number of cores that the task asked for, if that is set.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7, 8, 9, 11}, raising=False)
    cores = available_cores()
    assert cores == 5
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert cores_per_rank(detect_launch({})) == cores
    assert cores_per_rank(detect_launch(TORCHRUN)) == max(1, cores // 4)
    step = detect_launch(STEP | {"SLURM_NODEID": "0"})  # two tasks on this node
    assert cores_per_rank(step) == max(1, cores // 2)
    for asked, share in (("1", 1), ("9999", cores)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", asked)
        assert cores_per_rank(step) == share
        assert cores_per_rank(detect_launch({})) == cores  # it is for the tasks of a step


FIRST_HOSTS = [
    ("n[3,1,2]", "n3"),
    ("node[001-004,007]", "node001"),
    ("n[9-010]", "n9"),
    ("rack[1-2]-n[03-05,7]", "rack1-n03"),
    ("gpu-a.example.org,gpu-b", "gpu-a.example.org"),
]


@pytest.mark.parametrize(("text", "host"), FIRST_HOSTS)
def test_first_host(text, host):
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", ",n1", "n[1", "n[[1]]", "n[a]"])
def test_a_first_host_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ValueError) as error:
        first_host(text)
    assert f"malformed host list {text!r}: it must read like " in str(error.value)


@pytest.mark.slurm
@pytest.mark.skipif(not shutil.which("scontrol"), reason="scontrol is not installed")
def test_scontrol_names_the_same_first_hosts(tmp_path):
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\n")
    for text, host in FIRST_HOSTS:
        command = ["scontrol", "show", "hostnames", text]
        shown = run(*command, cwd=tmp_path, env={"SLURM_CONF": str(config)}).stdout
        assert shown.split()[0] == host
