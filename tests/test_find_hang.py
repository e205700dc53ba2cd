"""find_hang.py on logs and dumps, on a restart and on two nodes. drill/hangs.py makes hangs."""

import pickle
import re
import shutil
import sys

import pytest
from harness import ROOT, SCRIPTS, Evil, Running, free_port, run, torchrun
from slurm_cluster import Job

FIND_HANG = [sys.executable, SCRIPTS / "find_hang.py"]
LOGS = ROOT / "tests" / "hang_logs"  # two NCCL ranks on an H200, PyTorch 2.11, 2026-11-26
# What a rank of nccl2, the "nccl" of PyTorch 2.15, logs if its call times out, or another rank has
# aborted. PyTorch 2.14.1 logged it on the fake GPU; NCCL's words for the error are from an H200.
NCCL2 = """\
[rank{0}]:[E1129 21:22:49.505341179 WorkNCCL.cpp:192] [TC][rank={0}][name=0] Operation timed out \
after 15034 ms
[rank{0}]:[E1129 21:22:49.505505206 ProcessGroupNCCL.cpp:626] [TC][rank={0}][name=0] Aborting \
process on rank {0} due to timeout - timeout watchdog detected operation timeout
"""
NCCL2_LOST = """\
[rank{0}]:[E1129 21:23:27.804070510 ProcessGroupNCCLUtils.cpp:315] [TC][rank={0}][name=0] \
nccl hit async error on rank {0}: remote process exited or there was a network error
"""
FREEZE = """
import os, sys, time
import torch, torch.distributed as dist

def read_batch(step):
    if step == 2 and dist.get_rank() == 1:
        print("rank 1 freezes", flush=True)
        time.sleep(600)

if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    sys.exit("torchrun starts all ranks again")
rank, size = (int(os.environ[name]) for name in sys.argv[1:3])
dist.init_process_group("gloo", rank=rank, world_size=size)
for step in range(3):
    read_batch(step)
    dist.all_reduce(torch.ones(4))
"""


@pytest.fixture
def freeze(tmp_path):
    script = tmp_path / "freeze.py"
    script.write_text(FREEZE)
    return script


def verdicts(text):
    return [line.strip() for line in text.splitlines() if "verdict: " in line]


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        ("late-default", 0, "wait for rank 1, which has not called collective 5; its last was 4"),
        ("late-nodump", 1, "the ranks that we see (1) wait in the same call"),
        ("mismatch", 0, "rank 1 waits in collective 5, allreduce of 2000 elements: watchdog.py:15"),
    ],
)
def test_the_logs_of_a_real_gpu(log, code, says, tmp_path):
    ended = run(*FIND_HANG, LOGS / f"{log}.txt", cwd=tmp_path)
    assert ended.code == code, ended.stderr
    (verdict,) = verdicts(ended.stdout)
    assert says in verdict and verdict.startswith("no verdict" if code else "verdict")


def dump(folder, rank, *calls, completed=0, size=8, backend="nccl", ranks="[]"):
    """Write a dump as NCCL does, after these calls."""
    frame = {"name": "main", "filename": "/home/me/train.py", "line": 7}
    entries = [
        {
            "process_group": ("0", "default_pg"),
            "retired": number <= completed,
            "collective_seq_id": number,
            "profiling_name": f"{backend}:{kind}",
            "input_sizes": [[size]] if kind != "barrier" else [],
            "frames": [frame],
            "is_p2p": False,
        }
        for number, kind in enumerate(calls, 1)
    ]
    group = {"name": "0", "desc": "default_pg", "ranks": ranks}
    dumped = {"entries": entries, "pg_config": {"0": group}}
    (folder / f"rank_{rank}").write_bytes(pickle.dumps(dumped, protocol=2))


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        (
            [["all_reduce"] * 3, ["all_reduce"] * 2, ["all_reduce"] * 4],
            "rank 1, which has not called collective 3; its last was 2: allreduce of 8 elements, "
            "/home/me/train.py:7 in main",
        ),
        (
            [["all_reduce"] * 3, ["all_reduce"] * 3, ["all_reduce"] * 2 + ["broadcast"]],
            "calls: rank 2 waits in collective 3, broadcast of 8 elements: /home/me/train.py:7 in "
            "main; most others wait in collective 3, allreduce of 8 elements",
        ),
    ],
)
def test_dumps(calls, says, tmp_path):
    for rank, kinds in enumerate(calls):
        dump(tmp_path, rank, *kinds, completed=2)
    ended = run(*FIND_HANG, tmp_path, cwd=tmp_path)
    (verdict,) = verdicts(ended.stdout)
    assert ended.code == 0 and verdict.startswith("verdict: ") and says in verdict


def test_the_log_of_nccl2_names_no_call(tmp_path):
    """Rank 1 may have waited, too, for less than the timeout."""
    (tmp_path / "log").write_text(NCCL2.format(0) + NCCL2_LOST.format(1) + NCCL2.format(2))
    ended = run(*FIND_HANG, "log", cwd=tmp_path)
    assert "rank 0 waits in a collective that its log does not name" in ended.stdout
    assert ended.code == 1 and "of 3 ranks, we only know" in ended.stdout


def test_dumps_of_nccl2_list_the_rank_that_left_none(tmp_path):
    """The rank that is late has nothing that could time out, so it writes no log and no dump."""
    (tmp_path / "log").write_text(NCCL2.format(0) + NCCL2.format(1))
    for rank in (0, 1):
        calls = ["all_reduce", "barrier", "all_reduce"]
        dump(tmp_path, rank, *calls, completed=2, backend="nccl2", ranks="[0, 1, 2]")
    ended = run(*FIND_HANG, tmp_path, cwd=tmp_path)
    assert ended.code == 0 and "waits in collective 3, allreduce of 8 elements" in ended.stdout
    assert "wait for rank 2, which left no process, log or dump" in ended.stdout


def test_sizes_may_differ_in_a_scatter_but_not_in_a_broadcast(tmp_path):
    for kind, code in (("scatter", 1), ("broadcast", 0)):
        for rank in range(3):
            dump(tmp_path, rank, kind, size=8 * (rank == 0))
        assert run(*FIND_HANG, tmp_path, cwd=tmp_path).code == code


def test_a_dump_cannot_run_code(tmp_path):
    (tmp_path / "rank_0").write_bytes(pickle.dumps(Evil(tmp_path / "made"), protocol=2))
    ended = run(*FIND_HANG, tmp_path / "rank_0", cwd=tmp_path)
    assert ended.code == 1 and "a dump holds plain data, not" in ended.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.full
def test_a_rank_of_a_job_that_was_restarted(freeze, tmp_path):
    job = torchrun(2, freeze, "RANK", "WORLD_SIZE", restarts=1)
    with Running(*job, cwd=tmp_path) as running:
        running.wait_for("rank 1 freezes")
        ended = run(*FIND_HANG, cwd=tmp_path)
        running.kill()
    (found,) = [
        part for part in ended.stdout.split("\njob ") if ": freeze.py:" in part
    ]  # not another test's
    assert ended.code == 0 and ", restarted 1 times" in found
    assert "verdict: the others wait for rank 1, which stands still: freeze.py:8 in read_b" in found


LATE = """
import os, time
from parallel import initialize_ddp, on_rank

def is_late():
    print("rank 1 is late", flush=True)
    time.sleep(600)

initialize_ddp()
on_rank(1)(is_late)()
"""


@pytest.mark.full
def test_a_copy_of_the_package_may_have_another_name(tmp_path):
    shutil.copytree(ROOT / "src" / "ddp_ref", tmp_path / "parallel")
    (tmp_path / "late.py").write_text(LATE)
    with Running(*torchrun(2, "late.py"), cwd=tmp_path) as running:
        running.wait_for("rank 1 is late")
        ended = run(*FIND_HANG, cwd=tmp_path)
        running.kill()
    (found,) = [part for part in ended.stdout.split("\njob ") if ": late.py:" in part]
    assert "rank 0 waits in on_rank: late.py:10" in found, found
    assert "rank 1, which stands still: late.py:7 in is_late" in found


@pytest.mark.first
@pytest.mark.full
def test_hangs_on_purpose(tmp_path):
    """A part of `make test-hangs`."""
    cases = ["frozen_read", "endless_loop", "blocked_worker", "functional", "handler_validation"]
    cases += ["swallowed_exception", "straggler"]
    drill = ROOT / "drill" / "hangs.py"
    ended = run(sys.executable, drill, "--rounds", "1", "--only", *cases, cwd=tmp_path)
    assert ended.code == 0, ended.stdout
    rows = [re.findall(r"\d+", line) for line in ended.stdout.splitlines()[-3:]]
    alone, together, healthy = ["5", "5", "5", "5", "0"], ["1", "1", "1", "1", "0"], ["1"] * 3
    assert rows == [alone, together, [*healthy, "0"]], ended.stdout


@pytest.mark.slurm
def test_two_nodes(cluster, freeze, tmp_path):
    """The command in the docstring, with the job's number."""
    command = f"srun --ntasks=4 {sys.executable} {freeze} SLURM_PROCID SLURM_NTASKS"
    meet = f"MASTER_ADDR=$(hostname) MASTER_PORT={free_port()}"
    # Other tests have clusters of their own here, whose jobs may have the same number. So this step
    # gets a number that theirs do not reach.
    earlier = "for n in {1..5}; do srun --ntasks=1 true; done"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{earlier}\n{meet} {command}\n")
    with Job(cluster, "--nodes=2", "--ntasks-per-node=2", "job.sh", cwd=tmp_path) as job:
        job.wait_for("rank 1 freezes")
        tool = " ".join(map(str, FIND_HANG))
        look = f"srun --overlap --jobid={job.id} --nodes=2 --ntasks-per-node=1 {tool} --json"
        ended = cluster.run("bash", "-c", f"{look} | {tool} -", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    own = ended.stdout.partition(f"Slurm step {job.id}.5\n")[2].partition("\nSlurm step ")[0]
    waiting = [rank for rank in range(4) if f"rank {rank} waits in all_reduce: " in own]
    (verdict,) = verdicts(own)
    assert (
        waiting == [0, 2, 3] and "rank 1, which stands still: freeze.py:8 in read_batch" in verdict
    )
