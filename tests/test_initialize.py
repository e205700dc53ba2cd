"""Opening and closing the process group: real processes under every launcher, and every error."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from harness import Running, free_port, run, torchrun

from ddp_ref import (
    DistInfo,
    LaunchInfo,
    cleanup_ddp,
    initialize_ddp,
    run_ranks,
    seed_everything,
)
from ddp_ref.environment import available_cores
from ddp_ref.initialize import (
    _agree_on_device,
    _first_host_from_slurm_nodelist,
    _initialize_distributed,
    _is_env_distributed,
    _join_launch,
    _open_groups,
    _pick_device,
    _resolve_device,
    _should_use_distributed,
    open_group,
)
from ddp_ref.rendezvous import Rendezvous, RendezvousError, refuse_unsafe_restarts

CPU = torch.device("cpu")
ALONE = DistInfo(False, 0, 0, 1, CPU)
SHORT = timedelta(seconds=1)
HOST = "127.0.0.1"

COMMON = '''
import json, os, signal, sys, time
os.environ.pop("OMP_NUM_THREADS", None)  # the threads are ours to set
import torch
torch.set_num_threads(7)  # no rank's share of the cores
import torch.distributed as dist
from ddp_ref import cleanup_ddp, initialize_ddp
from ddp_ref.initialize import open_group

def side_group():
    opened = open_group()
    return opened and opened.side

def total(group=None):
    """Return the sum of all ranks' (rank + 1) over a group, which proves that it works."""
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value, group=group)
    return value.item()

def show(info):
    """Write this rank's description, which the test reads, to a file of its own."""
    assert info.distributed and info is initialize_ddp(), info
    expected = info.world_size * (info.world_size + 1) / 2
    assert total() == total(side_group()) == expected
    text = json.dumps([*info[:4], str(info.device), torch.get_num_threads()])
    with open(f"{info.rank}.json", "x") as file:
        file.write(text)
'''


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(COMMON + body)
    return path


def shown(tmp_path: Path) -> list[list]:
    """Return what the ranks wrote to their files, in rank order."""
    return sorted(json.loads(path.read_text()) for path in tmp_path.glob("*.json"))


@pytest.fixture(autouse=True)
def same_threads():
    """Restore the number of threads, which opening a group in this process changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@contextmanager
def no_group_left() -> Iterator[None]:
    yield
    assert not dist.is_initialized()
    assert open_group() is None


# ---------------------------------------------------------------- real ranks

LIFE = """
before = dict(os.environ)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
expected = world_size * (world_size + 1) / 2
first = initialize_ddp()
show(first)
assert open_group() is open_group()
assert not initialize_ddp(use_distributed=False).distributed

# The guide's call, under torchrun.
cleanup_ddp()
assert open_group() is None
assert initialize_ddp(rank=rank, world_size=world_size, backend="gloo") == first
assert total() == total(side_group()) == expected

# A master of our own beside torchrun's, and the ranks in a different order each time.
master = dict(rank=rank, world_size=world_size, master_addr="localhost", master_port=sys.argv[1])
for slow in reversed(range(world_size)):
    if rank == slow:
        time.sleep(0.4)
    cleanup_ddp()
    assert initialize_ddp(**master) == first
    assert total() == total(side_group()) == expected

# "nccl" without GPUs is the same error everywhere, and the next call works.
cleanup_ddp()
try:
    initialize_ddp(backend="nccl")
except RuntimeError as error:
    assert f"0 GPUs for {world_size} ranks" in str(error), error
else:
    raise AssertionError("nccl on CPUs")
assert not dist.is_initialized()

# A group that other code opened, destroyed and opened again, each time at a new address, because
# torch would read the addresses of the previous group if a store were used twice.
for name in "ab":
    meeting = f"file://{os.getcwd()}/{name}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    assert initialize_ddp() == first
    assert total() == total(side_group()) == expected
    dist.destroy_process_group()
    assert open_group() is None

assert initialize_ddp(use_distributed=True) == first
cleanup_ddp()
cleanup_ddp()
assert dict(os.environ) == before
"""


@pytest.mark.parametrize("nproc", [2, 3])
def test_open_close_and_reopen_under_torchrun(tmp_path, nproc):
    """Open, close and reopen the group in every way. The ranks agree at each step."""
    result = run(*torchrun(nproc, script(tmp_path, LIFE), free_port()), cwd=tmp_path, timeout=90)
    assert result.code == 0, result.stderr
    threads = max(1, available_cores() // nproc)
    assert shown(tmp_path) == [[True, r, r, nproc, "cpu", threads] for r in range(nproc)]


def test_two_nodes(tmp_path):
    """Two torchrun agents on this host act as two nodes, so local ranks differ from ranks."""
    path, port = script(tmp_path, "show(initialize_ddp())"), free_port()
    options = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=localhost"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, f"--master-port={port}"]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(Running(*command, f"--node-rank={node}", path, cwd=tmp_path))
            for node in range(2)
        ]
        for agent in agents:
            assert agent.wait(90).code == 0, agent.text()
    assert [line[:4] for line in shown(tmp_path)] == [[True, r, r % 2, 4] for r in range(4)]


FROZEN = """
import socket, threading
from ddp_ref import initialize, rendezvous
owner, name, when, how = sys.argv[1:]
calls = []

def freeze():
    signal.pthread_kill(threading.get_ident(), getattr(signal, how))  # this thread stops here

def freezing(function):
    def wrapper(*args, **kwargs):
        calls.append(args)
        if when == "before" or (when == "before the second" and len(calls) == 2):
            freeze()
        result = function(*args, **kwargs)
        if when == "after":
            freeze()
        return result
    return wrapper

rank = os.environ["RANK"]
if rank == "1":
    setattr(eval(owner), name, freezing(getattr(eval(owner), name)))
open(f"here{rank}", "w").close()
while not (os.path.exists("here0") and os.path.exists("here1")):
    time.sleep(0.01)
start = time.monotonic()
try:
    initialize_ddp(initialize.timedelta(seconds=TIMEOUT))
except RuntimeError as error:
    assert not dist.is_initialized()
    cleanup_ddp()
    print(f"{time.monotonic() - start:.1f}|{error}")
"""
MOMENTS = [
    ("initialize", "detect_launch", "before", "arrive"),
    ("socket", "create_connection", "before", "arrive"),
    ("socket", "create_connection", "after", "arrive"),
    ("dist", "TCPStore", "before", "arrive"),
    ("dist", "TCPStore", "after", "arrive"),
    ("rendezvous.Rendezvous", "_wait_for", "after", "open the group"),
    ("initialize", "_agree_on_device", "before", "open the group"),
    ("dist", "init_process_group", "before", "open the group"),
    ("dist.distributed_c10d", "_new_process_group_helper", "after", "open the group"),
    ("dist", "init_process_group", "after", "open the group"),
    ("dist", "new_group", "before", "open the group"),
    ("dist", "new_group", "after", "open the group"),
    ("rendezvous.Rendezvous", "_wait_for", "before the second", "open the group"),
    ("dist", "barrier", "before", None),
]
QUICK = [MOMENTS[4], MOMENTS[10], *MOMENTS[-2:]]


@pytest.mark.parametrize(
    ("owner", "name", "when", "stage"),
    [pytest.param(*m, marks=() if m in QUICK else pytest.mark.full) for m in MOMENTS],
)
def test_a_rank_that_freezes_while_the_group_opens_is_reported(tmp_path, owner, name, when, stage):
    """Rank 0 raises soon after the timeout of 4 seconds, and its process ends.

    It names the frozen rank, unless that rank freezes in the very last step.
    """
    seconds, error, start = error_of_rank_0(tmp_path, 4, owner, name, when, "SIGSTOP")
    assert seconds < 12
    assert error.startswith(start + expected_problem(stage, 4))


@pytest.mark.parametrize("moment", MOMENTS[-2:], ids=["before it reads", "before the barrier"])
def test_a_rank_that_dies_after_its_last_report_is_noticed_early(tmp_path, moment):
    """gloo only says that a connection was closed. Rank 0 raises long before the timeout."""
    seconds, error, start = error_of_rank_0(tmp_path, 30, *moment[:3], "SIGKILL")
    assert seconds < 15
    assert error.startswith(start + expected_problem(moment[3], 30))


def expected_problem(stage: str | None, timeout: int) -> str:
    if stage:
        return f"rank 1 did not {stage} (timeout 0:00:{timeout:02}): look at its output; it must be"
    problem = "all ranks reported, then one stopped answering"
    return f"{problem} (timeout 0:00:{timeout:02}): look at the other ranks' output\n"


def error_of_rank_0(tmp_path: Path, timeout: int, *moment: str) -> tuple[float, str, str]:
    """Return the seconds until rank 0 of 2 raised, its error, and how the error must begin."""
    port = str(free_port())
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": port}
    body = FROZEN.replace("TIMEOUT", str(timeout))
    command = [sys.executable, script(tmp_path, body), *moment]
    with ExitStack() as stack:
        first, _ = (
            stack.enter_context(
                Running(*command, cwd=tmp_path, env=common | {"RANK": rank, "LOCAL_RANK": rank})
            )
            for rank in "01"
        )
        result = first.wait(30)
    assert result.code == 0, result.stderr
    seconds, _, error = result.stdout.partition("|")
    return float(seconds), error, f"rank 0 of 2, master at {HOST}:{port}: "


@pytest.mark.parametrize("restarts", [2, pytest.param(8, marks=pytest.mark.full)])
def test_each_rank_is_killed_in_turn_and_restarted(tmp_path, restarts):
    """torchrun's agent keeps its store, but restarted ranks never read what a dead rank left."""
    body = f"""
info = initialize_ddp()
dist.barrier()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt < {restarts} and info.rank == attempt % 2:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
if attempt == {restarts}:
    show(info)
cleanup_ddp()
"""
    command = torchrun(2, "--monitor-interval=0.1", script(tmp_path, body), restarts=restarts)
    result = run(*command, cwd=tmp_path, timeout=200)
    assert result.code == 0, result.stderr
    assert [line[:4] for line in shown(tmp_path)] == [[True, r, r, 2] for r in range(2)]


def test_restart_by_torchrun(tmp_path):
    """A rank exits before it joins, and the restarted ranks meet again in the same store."""
    body = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    while not os.path.exists("waiting"):
        time.sleep(0.05)
    time.sleep(0.5)
    sys.exit(3)
open("waiting", "w").close()
show(initialize_ddp())
"""
    options = ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    master = [f"--master-addr={HOST}", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *master]
    result = run(*command, script(tmp_path, body), cwd=tmp_path, timeout=90)
    assert result.code == 0, result.stderr
    assert [line[:4] for line in shown(tmp_path)] == [[True, r, r, 2] for r in range(2)]


@pytest.mark.parametrize("shared", [pytest.param(False, marks=pytest.mark.full), True])
def test_restart_on_two_nodes(tmp_path, shared):
    """A rank of one agent is killed, and all ranks meet again in a new store.

    The agents may count their attempts differently, so a store that all attempts share is refused.
    """
    body = """
info = initialize_ddp()
if not os.path.exists("killed"):
    dist.barrier()
    if info.rank == 3:
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))  # fails, because rank 3 is missing
counts = [None] * 4
dist.all_gather_object(counts, os.environ["TORCHELASTIC_RESTART_COUNT"])
show(info)
cleanup_ddp()
"""
    options = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:{free_port()}", "--rdzv-id=two"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, script(tmp_path, body)]
    with ExitStack() as stack:
        env = {} if shared else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        agents = [stack.enter_context(Running(*command, cwd=tmp_path, env=env)) for _ in range(2)]
        for agent in agents:
            result = agent.wait(120)
            assert (result.code == 0) == (not shared), agent.text()
            refused = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun and use --rdzv-back"
            assert (refused in result.stderr) == shared
    if shared:
        return
    assert [line[:4] for line in shown(tmp_path)] == [[True, r, r % 2, 4] for r in range(4)]


def test_spawn(tmp_path):
    """The guide's call under mp.spawn, which sets no variables."""
    body = f"""
def worker(rank, port):
    show(initialize_ddp(rank=rank, world_size=2, master_addr="localhost", master_port=port))
    cleanup_ddp()

if __name__ == "__main__":
    torch.multiprocessing.spawn(worker, args=("{free_port()}",), nprocs=2)
"""
    result = run(sys.executable, script(tmp_path, body), cwd=tmp_path, timeout=90)
    assert result.code == 0, result.stderr
    threads = max(1, available_cores() // 2)
    assert shown(tmp_path) == [[True, r, r, 2, "cpu", threads] for r in range(2)]


def test_slurm_step(tmp_path):
    """Two tasks of a step with two cores each. Only Slurm's variables say where to meet."""
    step = {
        "SLURM_JOB_ID": str(random.SystemRandom().randrange(10**6)),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_CPUS_PER_TASK": "2",
    }
    path = script(tmp_path, "show(initialize_ddp())")
    with ExitStack() as stack:
        tasks = [
            stack.enter_context(Running(sys.executable, path, cwd=tmp_path, env=step | own))
            for own in ({"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2))
        ]
        for task in tasks:
            assert task.wait(90).code == 0, task.text()
    threads = min(2, available_cores())  # what the task asked for, not divided again
    assert shown(tmp_path) == [[True, r, r, 2, "cpu", threads] for r in range(2)]


def test_interrupt_while_waiting_for_the_others(tmp_path):
    body = f"""
print("waiting", flush=True)
initialize_ddp(rank=0, world_size=2, master_addr="{HOST}", master_port={free_port()})
"""
    with Running(sys.executable, script(tmp_path, body), cwd=tmp_path) as running:
        running.wait_for("waiting")
        running.process.send_signal(signal.SIGINT)
        result = running.wait(30)
    assert result.code == -signal.SIGINT
    assert "KeyboardInterrupt" in result.stderr


# ---------------------------------------------------------------- one process


def test_plain_python():
    assert initialize_ddp() == initialize_ddp() == ALONE
    assert initialize_ddp(rank=0, world_size=1) == ALONE
    assert not _is_env_distributed()
    assert not _should_use_distributed(None)
    cleanup_ddp()  # nothing to close


def test_use_distributed_false_ignores_the_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "broken", "SLURM_STEP_NUM_TASKS": "too"})
    assert initialize_ddp(use_distributed=False) == ALONE
    assert not _should_use_distributed(False)
    with pytest.raises(ValueError, match="LOCAL_RANK, WORLD_SIZE not set"):
        initialize_ddp()
    with pytest.raises(ValueError, match="LOCAL_RANK, WORLD_SIZE not set"):
        _is_env_distributed()


def test_use_distributed_true_without_a_launch_is_an_error():
    for call in (
        lambda: initialize_ddp(use_distributed=True),
        lambda: _should_use_distributed(True),
    ):
        with pytest.raises(RuntimeError, match="no launcher's variables are set"):
            call()


def test_world_of_one(monkeypatch):
    """With torchrun's variables for one rank, use_distributed=None opens no group, True does."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    master = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
    monkeypatch.setattr(os, "environ", one | master)
    assert not initialize_ddp(backend="gloo").distributed
    assert not _should_use_distributed(None)
    assert _should_use_distributed(True)
    assert _is_env_distributed()
    info = initialize_ddp(use_distributed=True, backend="gloo")
    try:
        assert info == (True, 0, 0, 1, CPU)
        assert initialize_ddp() is info
        dist.barrier(open_group().side)
    finally:
        cleanup_ddp()
    assert _initialize_distributed(SHORT) == info
    cleanup_ddp()


def test_torch_without_distributed(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    two = {"rank": 0, "world_size": 2, "master_addr": HOST, "master_port": 1}
    assert initialize_ddp() == initialize_ddp(**two, use_distributed=False) == ALONE
    assert open_group() is None
    cleanup_ddp()
    for wanted in (None, True):  # otherwise two separate runs would write the same files
        with pytest.raises(RuntimeError, match=r"built without torch\.distributed"):
            initialize_ddp(**two, use_distributed=wanted)


@pytest.mark.parametrize("rank", [0, 1])
def test_absent_ranks_are_named_and_the_address_is_free_again(rank):
    """The error names the missing ranks and the master. Then the address is free again at once."""
    port = free_port()
    with no_group_left(), ExitStack() as stack:
        if rank == 1:
            stack.callback(lambda store: None, dist.TCPStore(HOST, port, is_master=True))
        with pytest.raises(RuntimeError) as error:
            initialize_ddp(SHORT, rank=rank, world_size=3, master_addr=HOST, master_port=port)
    others = "1, 2" if rank == 0 else "0, 2"
    assert f"rank {rank} of 3, master at {HOST}:{port}" in str(error.value)
    assert f"rank {others} did not arrive (timeout 0:00:01)" in str(error.value)
    error = stack = None
    one = {"rank": 0, "world_size": 1, "master_addr": HOST, "master_port": port}
    assert initialize_ddp(**one, backend="gloo", use_distributed=True).distributed
    cleanup_ddp()


@pytest.mark.parametrize(
    ("host", "cause"),
    [(HOST, "refused"), ("no-such-host.invalid", "(not known|resolution)"), ("a..b", "label")],
)
def test_unreachable_master(host, cause):
    port = free_port()
    with no_group_left(), pytest.raises(RuntimeError, match=cause) as error:
        initialize_ddp(SHORT, rank=1, world_size=2, master_addr=host, master_port=port)
    assert f"{host}:{port}" in str(error.value)


def test_a_master_that_accepts_the_connection_but_never_answers(tmp_path):
    """The error names the address, soon after the timeout. Ctrl-C ends the wait earlier."""
    with socket.create_server((HOST, 0)) as silent, no_group_left():
        port = silent.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=f"{HOST}:{port}: the master does not answer"):
            initialize_ddp(SHORT, rank=1, world_size=2, master_addr=HOST, master_port=port)
        assert time.monotonic() - started < 10
        body = f"""
open("waiting", "w").close()
initialize_ddp(rank=1, world_size=2, master_addr="{HOST}", master_port={port})
"""
        with Running(sys.executable, script(tmp_path, body), cwd=tmp_path) as running:
            while not (tmp_path / "waiting").exists():
                assert running.process.poll() is None, running.text()
                time.sleep(0.05)
            time.sleep(0.5)
            running.process.send_signal(signal.SIGINT)
            assert running.wait(30).stderr.endswith("KeyboardInterrupt\n")


def test_a_frozen_rank_0_does_not_block_the_others_forever(tmp_path):
    def join(port, folder):
        served, given_up = folder / "served", folder / "given up"
        if os.environ["RANK"] == "0":
            store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False)
            waiting = f"while [ ! -e '{given_up}' ]; do sleep 0.1; done; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", waiting])
            served.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
            return store is not None
        while not served.exists():
            time.sleep(0.1)
        time.sleep(0.5)
        try:
            initialize_ddp(SHORT, rank=1, world_size=2, master_addr=HOST, master_port=port)
        except RuntimeError as error:
            return str(error)
        finally:
            given_up.touch()

    awake, text = run_ranks(join, free_port(), tmp_path, timeout=timedelta(seconds=60))
    assert awake and "the master does not answer (timeout 0:00:01)" in text


def test_the_local_rank_in_a_slurm_step_if_other_code_opened_the_group(tmp_path):
    """The local rank comes from Slurm if its step has the rank and the world size of the group."""

    def work(folder):
        rank = int(os.environ["RANK"])
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        step = {"JOB_ID": 7, "STEP_ID": 0, "STEP_NUM_TASKS": 2, "STEP_NODELIST": "a,b"}
        step |= {"PROCID": rank, "LOCALID": 0, "NODEID": rank, "STEP_TASKS_PER_NODE": "1(x2)"}
        os.environ.update({f"SLURM_{name}": str(value) for name, value in step.items()})
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
        local_ranks = [initialize_ddp().local_rank]
        dist.barrier()  # if one rank left now, it could cut off another that is still connecting
        cleanup_ddp()
        os.environ["LOCAL_RANK"] = "5"  # an incomplete set, which is no error in an open group
        dist.init_process_group("gloo", f"file://{folder}/again", rank=rank, world_size=2)
        dist.barrier()
        return [*local_ranks, initialize_ddp().local_rank]

    assert run_ranks(work, tmp_path, timeout=timedelta(seconds=60)) == [[0, 5], [0, 5]]


def test_a_step_that_opens_the_group_too_late_closes_it():
    """The main thread has already raised, so the step must end with an error of its own."""
    rendezvous = Rendezvous(LaunchInfo(launcher="torchrun", reason=""), SHORT)
    rendezvous.store = dist.HashStore()
    rendezvous.given_up.set()
    with no_group_left(), pytest.raises(RendezvousError, match="the main thread has raised"):
        _open_groups(rendezvous, CPU)


class CountingStore:
    """A store that counts the values that are read from it."""

    def __init__(self):
        self.store, self.values = dist.HashStore(), 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def multi_get(self, keys):
        self.values += len(keys)
        return self.store.multi_get(keys)


def test_ranks_exchange_reports_with_few_reads_from_the_store():
    """If each rank read the report of every other rank, the store would serve N² values."""
    ranks, store = 8, CountingStore()

    def exchange(rank):
        launch = LaunchInfo(
            launcher="arguments", rank=rank, world_size=ranks, local_world_size=1, reason=""
        )
        rendezvous = Rendezvous(launch, timedelta(seconds=30))
        rendezvous.store = store
        return rendezvous.run("arrive", lambda: rendezvous.exchange(f"report {rank}"))

    with ThreadPoolExecutor(ranks) as pool:
        exchanged = list(pool.map(exchange, range(ranks)))
    assert exchanged == [[f"report {rank}" for rank in range(ranks)]] * ranks
    assert store.values == 2 * ranks


def test_the_number_of_restarts_must_be_an_integer(monkeypatch):
    launch = LaunchInfo(launcher="torchrun", reason="")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "")
    refuse_unsafe_restarts(launch)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "x")
    with pytest.raises(ValueError, match="MAX_RESTARTS must be an integer, not 'x'"):
        refuse_unsafe_restarts(launch)


def test_failure_after_the_group_is_open(monkeypatch):
    monkeypatch.setattr(os, "environ", {"SLURM_CPUS_PER_TASK": "many"})
    master = {"master_addr": HOST, "master_port": free_port()}
    launch = LaunchInfo(launcher="slurm", reason="", **master)
    with no_group_left(), pytest.raises(ValueError, match="SLURM_CPUS_PER_TASK"):
        _join_launch(launch, SHORT, "gloo")


def test_port_in_use():
    with socket.socket() as other, no_group_left():
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"{port}.*MASTER_PORT.*address already in use"):
            initialize_ddp(SHORT, rank=0, world_size=2, master_addr=HOST, master_port=port)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "pass rank and world_size together"),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR, MASTER_PORT not set"),
        ({"rank": 2, "world_size": 2, "master_addr": HOST, "master_port": 1}, "rank=2"),
        ({"backend": "mpi"}, "backend must be .* not 'mpi'"),
        ({"timeout": timedelta(0)}, "timeout must be from a millisecond to 365 days"),
        ({"timeout": timedelta.max}, "timeout must be from"),
        ({"master_addr": ""}, "master_addr must be a host name or address, not ''"),
        ({"master_addr": 5}, "not 5"),
    ],
)
def test_wrong_arguments(arguments, message):
    with no_group_left(), pytest.raises(ValueError, match=message):
        initialize_ddp(**arguments)


# ---------------------------------------------------------------- devices

TWO = LaunchInfo(launcher="torchrun", reason="", rank=0, world_size=2, local_world_size=2)


def test_ranks_agree_on_the_device():
    """If every rank has a GPU of its own, they use CUDA.

    With some GPUs but too few, they use the CPU and warn in one line, or "nccl" is an error.
    """
    assert _agree_on_device(TWO, ["", ""], None) == CPU
    assert _agree_on_device(TWO, ["a", "b"], "gloo") == CPU
    for gpus in (["a", "a"], ["", "a"]):
        with pytest.warns(UserWarning, match="^1 GPU for 2 ranks: running on the CPU; [^\n]*$"):
            assert _agree_on_device(TWO, gpus, None) == CPU
        with pytest.raises(RuntimeError, match="1 GPU for 2 ranks: nccl needs one per rank"):
            _agree_on_device(TWO, gpus, "nccl")
    assert _agree_on_device(TWO, ["a", "b"], None) == _pick_device(0)
    assert _agree_on_device(TWO, ["a", "b"], "nccl") == _pick_device(0)


def test_device_that_is_not_there():
    assert _pick_device(3) == CPU
    assert _resolve_device("cpu") == _resolve_device(CPU) == CPU
    for device in ("cuda", "gpu", "gpu:0", "cuda:1", torch.device("cuda"), torch.device("cuda:3")):
        with pytest.warns(UserWarning, match=f"no {device} .*: using the CPU$"):
            assert _resolve_device(device) == CPU


@pytest.mark.parametrize("world", [1, 2])
def test_one_warning_about_the_device_names_the_users_line(world, tmp_path):
    (tmp_path / "script.py").write_text("""
import torch
from ddp_ref import Handler
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
Handler(model, optimizer, torch.nn.MSELoss(), device="cuda")
""")
    ended = run(*torchrun(world, "script.py"), cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    (warning,) = [line for line in ended.stderr.splitlines() if "using the CPU" in line]
    assert "script.py:6: UserWarning: no cuda (cuda devices: 0): using the CPU" in warning


def test_a_rank_that_sees_only_its_own_gpu_uses_index_0(monkeypatch):
    """As with Slurm's --gpus-per-task=1. If all GPUs are visible, the index is the local rank."""
    for count, index in ((1, 0), (4, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert _pick_device(3) == torch.device("cuda", index)


def test_first_host():
    assert _first_host_from_slurm_nodelist("node[007,001-004]") == "node007"
    with pytest.raises(ValueError, match=r"malformed host list 'node\[1'"):
        _first_host_from_slurm_nodelist("node[1")


# ---------------------------------------------------------------- seeds


@pytest.fixture
def generators():
    """Restore the states of the global random number generators after the test."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def drawn(*parts: int) -> tuple[float, float, float]:
    seed_everything(*parts)
    return torch.rand(1, dtype=torch.float64).item(), random.random(), numpy.random.rand()


def test_seeds(generators):
    assert drawn(7) == drawn(7)
    different = [(7,), (8,), (7, 0), (7, 1), (0, 7), (7, 0, 0), (7, 0, 1), (7, 1, 0), (71,), (-7,)]
    for values in zip(*(drawn(*parts) for parts in different), strict=True):
        assert len(set(values)) == len(different)
    assert drawn(numpy.int64(7), torch.tensor(1)) == drawn(7, 1)
    with pytest.raises(TypeError):
        seed_everything(0.5)


def test_seeds_are_the_same_in_every_process(generators):
    """Compare with fixed numbers, because a hash may differ between runs but agree within each."""
    assert drawn(2024, 3, 141) == (0.7090118509481602, 0.4332271932082037, 0.11704541460603202)


def test_a_malformed_local_rank_is_no_error_in_an_open_group(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "x")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert initialize_ddp()[:4] == (True, 0, 0, 1)
    cleanup_ddp()
