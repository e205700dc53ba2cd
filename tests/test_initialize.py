"""Opening and closing the process group: real processes under every launcher, and every error."""

import json
import os
import random
import re
import signal
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from harness import Running, free_port, listens, run, torchrun, wait_until
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from ddp_ref import Handler, TooFewGPUs, cleanup_ddp, initialize_ddp, seed_everything
from ddp_ref.initialize import (
    GLOO_TIMEOUT,
    NCCL_TIMEOUT,
    _agree_on_device,
    _initialize_distributed,
    _is_env_distributed,
    _pick_device,
    _resolve_device,
    _should_use_distributed,
)
from ddp_ref.launch import available_cores

CPU = torch.device("cpu")
SHORT = timedelta(seconds=1)
HOST = "127.0.0.1"

COMMON = """
import json, os, signal, sys, time
from datetime import timedelta
os.environ.pop("OMP_NUM_THREADS", None)  # the threads are ours to set
import torch
torch.set_num_threads(7)  # no rank's share of the cores
import torch.distributed as dist
from ddp_ref import cleanup_ddp, initialize_ddp
from ddp_ref.initialize import open_group

def total():  # the sum of all ranks' (rank + 1) proves that the group works
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    return value.item()

def show(info):  # in a file of its own, which the test reads
    assert info.distributed and info is initialize_ddp(), info
    assert total() == info.world_size * (info.world_size + 1) / 2
    text = json.dumps([*info[:4], str(info.device), torch.get_num_threads()])
    with open(f"{info.rank}.json", "x") as file:
        file.write(text)
"""


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(COMMON + body)
    return path


def start(path: Path, rank: int, world: int, port: int, **variables: str) -> Running:
    """Start a rank without a launcher: torchrun would end all ranks as soon as one ends."""
    env = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": HOST}
    env |= {"MASTER_PORT": str(port)} | variables
    return Running(sys.executable, path, cwd=path.parent, env=env)


def shown(tmp_path: Path) -> list[list]:
    """Return what the ranks wrote to their files, in rank order."""
    return sorted(json.loads(path.read_text()) for path in tmp_path.glob("*.json"))


# ---------------------------------------------------------------- real ranks

LIFE = """
before = dict(os.environ)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
first = initialize_ddp()
show(first)
assert open_group() is open_group()
assert not initialize_ddp(use_distributed=False).distributed

def opens(**arguments):
    assert initialize_ddp(**arguments) == first
    assert total() == world_size * (world_size + 1) / 2

# The guide's call, under torchrun.
cleanup_ddp()
assert open_group() is None
opens(rank=rank, world_size=world_size, backend="gloo")

# A master of our own beside torchrun's, and the ranks in a different order each time.
for slow in reversed(range(world_size)):
    if rank == slow:
        time.sleep(0.4)
    cleanup_ddp()
    opens(rank=rank, world_size=world_size, master_addr="localhost", master_port=sys.argv[1])

cleanup_ddp()

# A group that other code opened, destroyed and opened again, each time at a new address, because
# torch would read the addresses of the previous group if a store were used twice.
for name in "ab":
    meeting = f"file://{os.getcwd()}/{name}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    opens()
    dist.destroy_process_group()
    assert open_group() is None

opens(use_distributed=True)
cleanup_ddp()
cleanup_ddp()
assert dict(os.environ) == before
"""


def test_open_close_and_reopen_under_torchrun(tmp_path):
    """Open, close and reopen the group in every way. The ranks agree at each step."""
    result = run(*torchrun(3, script(tmp_path, LIFE), free_port()), cwd=tmp_path, timeout=90)
    assert result.code == 0, result.stderr
    threads = max(1, available_cores() // 3)
    assert shown(tmp_path) == [[True, r, r, 3, "cpu", threads] for r in range(3)]


@pytest.mark.full
def test_two_nodes(tmp_path):
    """Two torchrun agents on this host act as two nodes, so local ranks differ from ranks."""
    options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-id=two", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint={HOST}:{free_port()}", script(tmp_path, "show(initialize_ddp())")]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    agents = [Running(*command, cwd=tmp_path) for _ in range(2)]
    with agents[0], agents[1]:
        assert [agent.wait(120).code for agent in agents] == [0, 0], [a.text() for a in agents]
    assert [line[:4] for line in shown(tmp_path)] == [[True, r, r % 2, 4] for r in range(4)]


@pytest.mark.full
def test_restarted_ranks_meet_again(tmp_path):
    """torchrun's agent keeps its store, but restarted ranks never read what a dead rank left.

    In the first attempt, rank 1 exits before it joins, and rank 0 waits for it. In the next two,
    each rank is killed in turn while the group is open.
    """
    body = """
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt == 0 and rank == 1:
    time.sleep(1)
    sys.exit(3)
info = initialize_ddp()
if attempt == 3:
    show(info)
else:
    dist.barrier()
    if rank == attempt - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
"""
    command = torchrun(2, "--monitor-interval=0.1", script(tmp_path, body), restarts=3)
    result = run(*command, cwd=tmp_path, timeout=120)
    assert result.code == 0, result.stderr
    assert [line[:4] for line in shown(tmp_path)] == [[True, r, r, 2] for r in range(2)]


def test_an_unsafe_restart_on_several_nodes_is_refused(monkeypatch):
    """The agents may count their attempts differently, and here they share one store."""
    rank = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    master = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    monkeypatch.setattr(os, "environ", rank | master | agent)
    refused = "^--max-restarts=3 on several nodes .* set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for"
    with pytest.raises(RuntimeError, match=refused):
        initialize_ddp(SHORT)


def test_the_missing_rank_is_named_on_all_others(tmp_path):
    """Rank 0, with the store, exits as soon as it gives up, as a process of mp.spawn does."""
    body = """
try:
    initialize_ddp(timedelta(seconds=6))
except RuntimeError as error:
    print(error, flush=True)
    os._exit(1)
"""
    path, port = script(tmp_path, body), free_port()
    with ExitStack() as stack:
        ranks = [stack.enter_context(start(path, rank, 4, port)) for rank in range(3)]
        for number, rank in enumerate(ranks):
            where = rf"rank {number} of 4, master at {HOST}:\d+: "
            missing = where + r"rank 3 did not arrive \(timeout 0:00:06\)\. "
            assert re.match(missing, rank.wait(40).stdout)


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupt_while_waiting(tmp_path, rank):
    """Ctrl-C ends the wait of rank 0 for rank 1, and of rank 1 for the master."""
    body = 'print("waits", flush=True)\ninitialize_ddp()'
    with start(script(tmp_path, body), rank, 2, free_port()) as running:
        running.wait_for("waits")
        time.sleep(1)
        running.process.send_signal(signal.SIGINT)
        result = running.wait(10)
    assert result.code == -signal.SIGINT and "KeyboardInterrupt" in result.stderr


def test_two_jobs_on_one_port_do_not_train_with_each_other(tmp_path):
    """A's rank 0 hosts the store before B's rank 1 comes, then A's rank 1, then B's rank 0."""
    body = """
print("starts", flush=True)
show(initialize_ddp(timedelta(seconds=20)))
"""
    path, port = script(tmp_path, body), free_port()

    with start(path, 0, 2, port, DDP_JOB_NAME="A") as a0:
        a0.wait_for("starts")
        wait_until(lambda: listens(port))
        with start(path, 1, 2, port, DDP_JOB_NAME="B") as b1:
            foreign = b1.wait(30)
        with (
            start(path, 1, 2, port, DDP_JOB_NAME="A") as a1,
            start(path, 0, 2, port, DDP_JOB_NAME="B") as b0,
        ):
            results = [each.wait(40) for each in (a0, a1, b0)]
    assert [result.code for result in results] == [0, 0, 1], results
    assert f"rank 1 of job 'B': the store at {HOST}:{port} belongs to job 'A'" in foreign.stderr
    assert "address already in use" in results[2].stderr
    assert [line[:4] for line in shown(tmp_path)] == [[True, r, r, 2] for r in range(2)]


# ---------------------------------------------------------------- one process


def test_use_distributed_false_ignores_the_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "broken", "SLURM_STEP_NUM_TASKS": "too"})
    assert initialize_ddp(use_distributed=False) == (False, 0, 0, 1, CPU)


@pytest.mark.parametrize("opens", [_initialize_distributed, partial(_should_use_distributed, True)])
def test_use_distributed_true_without_a_launch_is_an_error(opens):
    with pytest.raises(RuntimeError, match="no launcher's variables are set"):
        opens()


def test_world_of_one(monkeypatch):
    """With torchrun's variables for one rank, use_distributed=None opens no group, True does."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    master = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(os, "environ", one | master)
    assert not initialize_ddp().distributed and not _should_use_distributed(None)
    assert _should_use_distributed(True) and _is_env_distributed()
    info = _initialize_distributed()  # initialize_ddp with use_distributed=True
    assert info == (True, 0, 0, 1, CPU) and initialize_ddp() is info
    default = dist.distributed_c10d._get_default_group()
    assert default._get_backend(CPU).options._timeout == default_pg_timeout == GLOO_TIMEOUT
    assert default_pg_nccl_timeout in (NCCL_TIMEOUT, None)  # None in a build without NCCL
    cleanup_ddp()


def test_unreachable_master():
    """The error has the system's text."""
    master = {"master_addr": "no-such-host.invalid", "master_port": free_port()}
    with pytest.raises(RuntimeError, match=r"no-such-host.invalid:\d+: .*(not known|resolution)"):
        initialize_ddp(SHORT, rank=1, world_size=2, **master)


# ---------------------------------------------------------------- devices


def reports(
    gpus: list[list[str]], backend: str | None = None, share: bool = False, nodes: str = "aaaa"
) -> list[dict]:
    """Return what these ranks report, whose GPUs and nodes are given."""
    nodes = nodes[: len(gpus)]
    common = {"backend": backend, "share_gpus": share}
    return [
        {"node": node, "local_rank": nodes[:rank].count(node), "gpus": seen, **common}
        for rank, (seen, node) in enumerate(zip(gpus, nodes, strict=True))
    ]


def test_ranks_agree_on_the_device():
    """CUDA if every rank has a GPU of its own, the CPU if no rank sees one, otherwise an error."""
    assert _agree_on_device(0, reports([[], []])) == CPU
    both = ["a", "b"]
    assert _agree_on_device(0, reports([both] * 2, "gloo")) == CPU
    for gpus, nodes in [([both] * 2, "aa"), ([["a"], ["b"]], "aa"), ([["a"], ["b"]], "ab")]:
        assert _agree_on_device(0, reports(gpus, nodes=nodes)) == _pick_device(0)
    for gpus, backend in [([["a"], ["a"]], None), ([[], ["a"]], None), ([[], []], "nccl")]:
        with pytest.raises(TooFewGPUs, match=r"^[01] GPUs? for 2 ranks: start one rank per GPU"):
            _agree_on_device(0, reports(gpus, backend))
    with pytest.raises(ValueError, match=r"^backend differs .* \['gloo', None\]: pass the same$"):
        _agree_on_device(0, reports([["a"]], "gloo") + reports([["b"]]))


def test_ranks_share_gpus_on_one_machine_only_and_if_all_of_them_do(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    one = [["a"], ["a"]]
    with pytest.raises(TooFewGPUs, match=r"1 GPU for 2 ranks: .* share_gpus=True on all"):
        _agree_on_device(0, [*reports(one)[:1], *reports(one, share=True)[1:]])
    with pytest.raises(TooFewGPUs, match=r"2 GPUs for 3 ranks: .* run on one machine"):
        _agree_on_device(0, reports([*one, ["b"]], share=True, nodes="aab"))
    _agree_on_device(0, reports(one, share=True))
    assert os.environ == {"NCCL_HOSTID": "rank 0", "NCCL_SOCKET_IFNAME": "lo"}


def test_device_that_is_not_there():
    for device in ("gpu:0", torch.device("cuda:3")):
        with pytest.warns(UserWarning, match=f"no {device} .*: using the CPU$"):
            assert _resolve_device(device) == CPU
    model = torch.nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="no cuda .*: using the CPU$") as caught:
        Handler(model, torch.optim.SGD(model.parameters()), torch.nn.MSELoss(), device="cuda")
    assert [warning.filename for warning in caught] == [__file__]  # the user's own line


def test_a_rank_that_sees_only_its_own_gpu_uses_index_0(monkeypatch):
    """As with Slurm's --gpus-per-task=1. If all GPUs are visible, the index is the local rank."""
    for count, index in ((1, 0), (4, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert _pick_device(3) == torch.device("cuda", index)


# ---------------------------------------------------------------- seeds


def drawn(*parts: int) -> tuple[float, float, float]:
    seed_everything(*parts)
    return torch.rand(1, dtype=torch.float64).item(), random.random(), numpy.random.rand()


def test_seeds():
    different = [(7,), (7, 0), (7, 1), (0, 7), (7, 0, 0), (7, 1, 0), (71,), (-7,)]
    for values in zip(*(drawn(*parts) for parts in different), strict=True):
        assert len(set(values)) == len(different)
    # A hash may differ between runs but agree within each, so these numbers are fixed.
    assert drawn(2024, 3, 141) == (0.7090118509481602, 0.4332271932082037, 0.11704541460603202)
