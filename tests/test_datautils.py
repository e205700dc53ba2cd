"""The data sets are the same everywhere, and the helpers of the scripts do what they say."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from harness import ROOT, SCRIPTS, Running, run
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import datautils

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "node[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "3",
}


def test_digits():
    train, test = datautils.digits("train").tensors, datautils.digits("test").tensors
    assert train[0].shape == (1440, 64) and test[0].shape == (357, 64)
    assert train[0].dtype == torch.float32 and train[1].dtype == torch.int64
    assert train[0].min() == 0 and train[0].max() == 1
    counts = torch.bincount(train[1]), torch.bincount(test[1])  # stratified: 80.13 % of each digit
    share = counts[0] / (counts[0] + counts[1])
    torch.testing.assert_close(share, torch.full((10,), 1440 / 1797), rtol=0, atol=5e-3)
    both = torch.cat([train[0], test[0]])
    assert len(both.unique(dim=0)) == 1797  # no image is in both parts


def test_digits_are_the_same_in_every_process_and_folder(tmp_path):
    code = """if True:
        import hashlib, datautils
        tensors = [t for part in ("train", "test") for t in datautils.digits(part).tensors]
        tensors += [datautils.MyTrainDataset(100, seed=3).inputs]
        print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest())
    """
    other = tmp_path / "other"
    other.mkdir()
    seen = {run(sys.executable, "-c", code, cwd=folder).stdout for folder in (tmp_path, other)}
    assert len(seen) == 1 and len(seen.pop()) == 65


def test_unknown_split():
    with pytest.raises(ValueError, match=r"split must be \"train\" or \"test\", not 'val'"):
        datautils.digits("val")


def test_toy():
    one, again = datautils.MyTrainDataset(50, seed=1), datautils.MyTrainDataset(50, seed=1)
    other = datautils.MyTrainDataset(50, seed=2)
    assert len(one) == 50 and one[0][0].shape == (20,) and one[0][1].shape == (1,)
    assert torch.equal(one.inputs, again.inputs) and not torch.equal(one.inputs, other.inputs)
    solution = torch.linalg.lstsq(  # learnable: one linear function explains both seeds
        torch.cat([one.inputs, torch.ones(50, 1)], dim=1), one.targets
    ).solution
    guess = torch.cat([other.inputs, torch.ones(50, 1)], dim=1) @ solution
    torch.testing.assert_close(guess, other.targets, atol=1e-4, rtol=0)


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_single_gpu_draws_the_order_of_the_distributed_sampler(epoch):
    data, seed = range(1440), 3
    single = RandomSampler(data, generator=torch.Generator().manual_seed(seed + epoch))
    ranks = [DistributedSampler(data, 2, rank, seed=seed) for rank in range(2)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    pairs = zip(*ranks, strict=True)
    assert list(single) == [index for pair in pairs for index in pair]


def test_count_right():
    data = [(torch.eye(3), torch.tensor([0, 1, 1])), (torch.eye(3)[:1], torch.tensor([0]))]
    right, answers = datautils.count_right(torch.nn.Identity(), data, torch.device("cpu"))
    assert (right, answers) == (3, 4)
    numbers = torch.tensor([[0.0], [1.0], [2.0]])
    data = DataLoader(list(zip(numbers, numbers + 0.06, strict=True)), 2)
    assert datautils.count_right(torch.nn.Identity(), data, torch.device("cpu")).tolist() == [3, 3]
    assert datautils.count_right(torch.nn.Identity(), [], torch.device("cpu")).tolist() == [0, 0]


def test_share_cores(tmp_path):
    code = """if True:
        import datautils, torch
        torch.set_num_threads(6)
        datautils.share_cores(2)
        print(torch.get_num_threads())
        datautils.share_cores(100)
        print(torch.get_num_threads())
    """
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    shared = subprocess.check_output([sys.executable, "-c", code], env=environment, timeout=60)
    assert shared.split() == [b"3", b"1"]
    environment["OMP_NUM_THREADS"] = "1"
    fixed = subprocess.check_output([sys.executable, "-c", code], env=environment, timeout=60)
    assert fixed.split() == [b"6", b"6"]


@pytest.fixture
def slurm_client(tmp_path):
    """Return the variables with which the real scontrol expands host lists, without a cluster."""
    if shutil.which("scontrol") is None:
        assert "CI" not in os.environ, "CI must install slurm-client"
        pytest.skip("no scontrol on this machine (Debian: apt-get install slurm-client)")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\n")
    return {"SLURM_CONF": str(conf)}


def test_read_slurm_step(monkeypatch, slurm_client):
    monkeypatch.setenv("SLURM_CONF", slurm_client["SLURM_CONF"])
    host, port, local_ranks = datautils.read_slurm_step(STEP)
    assert (host, local_ranks) == ("node2", "1")
    assert 10000 <= int(port) < 30000
    assert datautils.read_slurm_step(STEP | {"SLURM_NODEID": "0"})[2] == "2"
    assert datautils.read_slurm_step(STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,4,5,16"})[2] == "16"
    assert datautils.read_slurm_step(STEP | {"SLURM_STEP_ID": "2"})[1] != port


def test_multinode_under_the_variables_of_a_slurm_step(tmp_path, slurm_client):
    """Two processes with what srun sets find each other and share the work."""
    step = (
        STEP
        | slurm_client
        | {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NODEID": "0",
        }
    )
    command = [sys.executable, SCRIPTS / "multinode_slurm.py", "--epochs", "1"]
    task = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    with (
        Running(*command, cwd=tmp_path, env=task[0]) as first,
        Running(*command, cwd=tmp_path, env=task[1]) as second,
    ):
        results = [first.wait(), second.wait()]
    assert [result.code for result in results] == [0, 0], results
    assert "2 ranks: running on the CPU | effective batch 64 | 23 opt" in results[0].stdout
    assert "rank 1 is local rank 1 on " in results[1].stdout
    assert "epoch 1 | saved snapshot.pt" in results[0].stdout


def test_a_slurm_job_outside_a_step_is_one_process(tmp_path):
    """SLURM_NTASKS=4 in an sbatch body without srun, or an interactive shell, is no launch."""
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    command = [sys.executable, SCRIPTS / "multinode_slurm.py", "--epochs", "1"]
    result = run(*command, cwd=tmp_path, env=job)
    assert result.code == 0, result.stderr
    assert "for 1 rank: running on the CPU | effective batch 32 | 45 opt" in result.stdout


def test_make_names_its_targets(tmp_path):
    shown = run("make", "-C", ROOT, cwd=tmp_path).stdout
    for target in ("setup", "single", "multigpu", "torchrun", "slurm", "test", "lint", "clean"):
        name = f"run-{target}" if target in ("single", "multigpu", "torchrun", "slurm") else target
        assert f"  {name} " in shown
