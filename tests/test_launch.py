"""Launch detection: by which variables, and when a process refuses to train alone."""

import math
import os

import pytest

from ddp_ref.launch import (
    MASTER_NAMES,
    NODES,
    SIZES,
    available_cores,
    cores_per_rank,
    detect_launch,
    first_host,
    without_launch,
)

MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29400"}
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "7f"} | MASTER
# From a task that Slurm 22.05 started with `srun --nodes=2 --ntasks=3` inside an sbatch.
STEP = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_STEP_NUM_TASKS": "3",
}
# The batch script has these, too, and the interactive shell of salloc is a step of one task.
BATCH = {name: value for name, value in STEP.items() if "_STEP_" not in name}
BATCH |= {"SLURM_PROCID": "0"}
INTERACTIVE = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "n1"}
INTERACTIVE |= {"SLURM_STEP_NUM_TASKS": "1"}


def test_slurm_step():
    info = detect_launch(STEP)
    assert (info.launcher, info.rank, info.local_rank, info.world_size) == ("slurm", 2, 0, 3)
    assert info.master_addr == "n3"  # of the step's nodes, not the job's
    assert 1023 < info.master_port < 32768  # Linux assigns ports from there on by itself
    ports = {
        detect_launch(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(900_000, 900_100)
        for step in range(10)
    }
    assert len(ports) == 1000
    both = detect_launch(STEP | MASTER)
    assert (both.master_addr, both.master_port) == ("node7", 29400)


def test_a_job_has_a_name_that_tells_its_ranks_from_those_of_another_job():
    names = [detect_launch(env).job for env in (STEP, STEP | {"SLURM_STEP_ID": "2"}, TORCHRUN)]
    assert names == ["5.1", "5.2", "7f"]
    assert detect_launch(TORCHRUN | {"DDP_JOB_NAME": "mine"}).job == "mine"


# Other allocations, as in the body of a batch script.
LSF = {"LSB_DJOB_NUMPROC": "4", "LSB_MCPU_HOSTS": "n1 2 n2 2"}
PBS = {"PBS_NODEFILE": "/var/spool/aux/5", "PBS_NODENUM": "0", "PBS_TASKNUM": "1"}
LINK = {"MASTER_PORT": "tcp://10.0.0.1:29500"}  # in a pod, next to a service called master
ONE_BY_MPI = {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}


@pytest.mark.parametrize(
    "environ",
    [
        *({}, BATCH, INTERACTIVE, LSF, PBS),
        {"JOB_COMPLETION_INDEX": "1"},  # a pod of an Indexed Job or JobSet, documented
        *({"MASTER_PORT": "1"}, LINK),
        {"RANK": "", "MASTER_ADDR": "", "SLURM_STEP_NUM_TASKS": ""},  # empty: not set
        BATCH | {"NNODES": "2"},  # exported for the steps of the sbatch script
        INTERACTIVE | {"PMIX_RANK": "0"},  # srun --mpi=pmix --ntasks=1
        ONE_BY_MPI,
        STEP | ONE_BY_MPI,  # the step's tasks are mpirun's daemons
    ],
)
def test_one_process(environ):
    info = detect_launch(environ)
    assert (info.launcher, info.rank, info.local_rank, info.world_size) == ("none", 0, 0, 1)
    assert info.master_addr is info.master_port is None
    assert ("Slurm" in info.reason) == ("SLURM_JOB_ID" in environ)


SSH = {"NODE_RANK": "1", "NNODES": "2"} | MASTER
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-0",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}
POD = {"RANK": "1", "WORLD_SIZE": "2"} | MASTER
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
TF_CONFIG = '{"cluster": {"chief": ["n1:1"],\n "worker": ["n2:1"]}, "task": {"index": 0}}'
PER_NODE = "--nnodes=NODES --rdzv-backend=c10d --rdzv-endpoint=HOST"


@pytest.mark.parametrize(
    ("environ", "sign", "options"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2", PER_NODE),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"} | MASTER, "PMI_SIZE=2", PER_NODE),
        ({"MV2_COMM_WORLD_SIZE": "2"} | BATCH, "MV2_COMM_WORLD_SIZE=2", PER_NODE),
        # The daemons of mpirun are the tasks of the step.
        (STEP | {"OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_SIZE=3", PER_NODE),
        (STEP | {"PMI_SIZE": "6"}, "PMI_SIZE=6, SLURM_STEP_NUM_TASKS=3, SLURM_PROCID=2", PER_NODE),
        (BATCH | {"SLURM_PROCID": "2", "PMI_SIZE": "4"}, "PMI_SIZE=4, SLURM_PROCID=2", PER_NODE),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE=2", PER_NODE),
        ({"TF_CONFIG": TF_CONFIG}, "TF_CONFIG={.*", PER_NODE),
        ({"CLUSTER_SPEC": TF_CONFIG}, "CLUSTER_SPEC={.*", PER_NODE),
        (LSF | {"LSF_PM_TASKID": "1"}, "LSF_PM_TASKID=1", PER_NODE),  # blaunch counts from 1
        (PBS | {"PBS_TASKNUM": "2"}, "PBS_TASKNUM=2", PER_NODE),  # pbsdsh; the script is task 1
        (PBS | {"PBS_NODENUM": "1"}, "PBS_NODENUM=1", PER_NODE),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, "FLUX_JOB_SIZE=2", PER_NODE),
        ({"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"}, "JSM_NAMESPACE_SIZE=2", PER_NODE),
        ({"PALS_RANKID": "0", "PALS_NODEID": "0"}, "PALS_RANKID=0", PER_NODE),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0", PER_NODE),
        (INTERACTIVE | {"PMIX_RANK": "1"}, "PMIX_RANK=1", PER_NODE),
        (
            KUBEFLOW,
            "PET_NNODES=2, PET_NODE_RANK=1",
            "--nnodes=2 --node-rank=$PET_NODE_RANK --master-addr=$PET_MAS",
        ),
        ({"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8", PER_NODE),
        (SAGEMAKER, "SM_HOSTS=.*", "--nnodes=2 --node-rank=$((${SM_CURRENT_HOST#algo-} - 1)) "),
        (SSH, "NNODES=2, NODE_RANK=1", "--nnodes=2 --node-rank=$NODE_RANK --master-addr=$MASTER_"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1", PER_NODE),
        # One `srun --ntasks=1` per node, in a loop.
        (INTERACTIVE | SSH, "NNODES=2, NODE_RANK=1", "--nnodes=2 --node-rank=$NODE_RANK "),
        (BATCH | {"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NUM_NODES=2", "--nnodes=2 "),
        (POD | {"NPROC_PER_NODE": "8"}, "NPROC_PER_NODE=8, WORLD_SIZE=2", "=2 --node-rank=$RANK "),
        (POD | {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8, WORLD_SIZE=2", "-rank=$RANK "),
        # RANK and WORLD_SIZE are left over from a shell.
        (ALONE | {"PMI_SIZE": "2"}, "PMI_SIZE=2, WORLD_SIZE=1", PER_NODE),
        (ALONE | STEP, "SLURM_STEP_NUM_TASKS=3, SLURM_PROCID=2, WORLD_SIZE=1", PER_NODE),
        ({"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NUM_NODES=2", "--node-rank=$SKYPILOT_NODE_RANK "),
        ({"DSTACK_NODES_NUM": "2"}, "DSTACK_NODES_NUM=2", "--master-addr=$DSTACK_MASTER_NODE_IP"),
        ({"LWS_GROUP_SIZE": "2"}, "LWS_GROUP_SIZE=2", "--master-addr=$LWS_LEADER_ADDRESS"),
        ({"PET_NNODES": "1:2"}, "PET_NNODES=1:2", "--nnodes=2 "),
    ],
)
def test_one_of_several_processes_does_not_run_alone(environ, sign, options):
    """The error names the platform's torchrun line and the way to run alone."""
    with pytest.raises(ValueError, match=f"^{sign}: one of several processes[^\n]*$") as caught:
        detect_launch(environ)
    command = str(caught.value).split("`")[1]
    assert command.startswith("torchrun --nproc-per-node=gpu ") and options in command
    assert str(caught.value).endswith("use_distributed=False to run alone")
    passed = {"rank": 0, "world_size": 2, "master_addr": "n1", "master_port": 1}
    assert detect_launch(environ, **passed).rank == 0
    assert detect_launch(environ | TORCHRUN).launcher == "torchrun"  # as that command starts it
    left = without_launch(environ | TORCHRUN)
    assert not {"SM_HOSTS", "SM_CURRENT_HOST", "NODE_RANK", *left} - {*environ, *SAGEMAKER, *SSH}
    assert detect_launch(left).launcher == "none"


SPEC = '{"cluster": {"worker": ["n1:1"]}, "task": {"type": "worker", "index": 5}}'
ONE = ["1", "1:1", "gpu", '["algo-1"]', SPEC]


@pytest.mark.parametrize("number", ONE)
def test_one_node_and_one_process_are_no_sign_of_several(number):
    assert detect_launch(dict.fromkeys(NODES, number)).launcher == "none"
    others = {name: number for name in SIZES if name not in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")}
    assert detect_launch(others).launcher == "none"
    assert detect_launch(ALONE | others).launcher == "torchrun"
    assert detect_launch(STEP | {"NNODES": "2", "NODE_RANK": "1"}).launcher == "slurm"
    assert detect_launch(STEP | {"PET_NPROC_PER_NODE": number}).launcher == "slurm"


def test_one_process_per_pod_needs_no_local_rank():
    """Kubeflow's PyTorchJob and Vertex AI. initialize_ddp counts the ranks of each host."""
    info = detect_launch(POD | {"PET_NPROC_PER_NODE": "auto"})
    assert (info.launcher, info.rank, info.local_rank, info.world_size) == ("torchrun", 1, None, 2)


def test_precedence_of_the_launchers():
    assert detect_launch(STEP | {"PMI_SIZE": "3", "PMI_RANK": "2"}).launcher == "slurm"
    assert detect_launch(STEP | {"PMIX_RANK": "2"}).launcher == "slurm"
    assert detect_launch(STEP | TORCHRUN).launcher == "torchrun"  # srun torchrun
    alone = ALONE | {"TORCHELASTIC_RUN_ID": "7f"}  # torchrun itself started one process
    assert detect_launch(alone | SSH | STEP).world_size == 1
    chosen = detect_launch(STEP | TORCHRUN, rank=3, world_size=7)
    assert (chosen.launcher, chosen.rank, chosen.world_size) == ("arguments", 3, 7)
    assert chosen.local_rank is None  # TORCHRUN's is of 8 ranks


def test_arguments():
    """They override variables, which supply the rest if the ranks are those of the step."""
    info = detect_launch(TORCHRUN, rank=6, world_size=8, master_port="1234")
    assert (info.rank, info.local_rank) == (6, 1)
    assert (info.master_addr, info.master_port) == ("node7", 1234)  # one from each source
    assert detect_launch({}, rank=0, world_size=1).master_addr is None  # one rank needs no master
    step = detect_launch(STEP)
    info = detect_launch(STEP, rank=1, world_size=3)  # perhaps not numbered like the tasks
    assert (info.launcher, info.local_rank, info.job) == ("arguments", None, "5.1")
    assert (info.master_addr, info.master_port) == (step.master_addr, step.master_port)


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), MASTER_NAMES])
def test_an_incomplete_set_of_variables_is_an_error(names):
    base = {"LOCAL_RANK": "0"} if "RANK" in names else {"RANK": "0", "WORLD_SIZE": "2"}
    for missing in names:
        with pytest.raises(ValueError, match=f"^{missing} not set: "):
            detect_launch(base | {name: TORCHRUN[name] for name in {*names} - {missing}})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (POD | LINK, "integer, not 'tcp://10.0.0.1:29500' .* service called master.$"),
        (BATCH | {"MASTER_ADDR": "n1"}, "^MASTER_PORT not set"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "^SLURM_PROCID, SLURM_LOCALID, .* not set"),
        (TORCHRUN | {"RANK": "8"}, r"^rank=8, local_rank=1 and world_size=8 contradict "),
        (STEP | {"SLURM_STEP_NODELIST": "n[1"}, r"malformed host list 'n\[1': it must read like "),
    ],
)
def test_invalid_launches_are_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        detect_launch(environ)


def test_cores_per_rank(monkeypatch):
    """A rank's share is the available cores divided by the number of ranks on this node.

    Under Slurm it is the number of cores that the task asked for, if that is set.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7, 8, 9, 11})
    monkeypatch.setattr("ddp_ref.launch._cgroup_quota", lambda: math.inf)
    assert available_cores() == 5
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    for launch in map(detect_launch, ({}, TORCHRUN, STEP)):
        assert [cores_per_rank(launch, ranks) for ranks in (1, 2, 8)] == [5, 2, 1]
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert cores_per_rank(detect_launch(STEP), 2) == 1
    assert cores_per_rank(detect_launch({}), 1) == 5  # it is for the tasks of a step


def test_a_containers_quota_limits_the_cores(tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(5))
    monkeypatch.setattr("ddp_ref.launch.CGROUP", tmp_path)
    assert available_cores() == 2


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("n[3,1,2]", "n3"),
        ("node[001-004,007]", "node001"),
        ("rack[1-2]-n[03-05,7]", "rack1-n03"),
        ("gpu-a.example.org,gpu-b", "gpu-a.example.org"),
    ],
)
def test_first_host(text, host):
    """They are the first names that `scontrol show hostnames` prints."""
    assert first_host(text) == host
