"""The data sets are the same everywhere, and the helpers of the scripts do what they say."""

import os
import runpy
import shutil
import sys

import pytest
import torch
from harness import ROOT, SCRIPTS, free_port, run
from torch.utils.data import DataLoader

import datautils

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "node[2-5]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "6",  # the ranks on this node
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


def test_count_right():
    data = [(torch.eye(3), torch.tensor([0, 1, 1])), (torch.eye(3)[:1], torch.tensor([0]))]
    right, answers = datautils.count_right(torch.nn.Identity(), data, torch.device("cpu"))
    assert (right, answers) == (3, 4)
    numbers = torch.tensor([[0.0], [1.0], [2.0]])
    data = DataLoader(list(zip(numbers, numbers + 0.06, strict=True)), 2)
    assert datautils.count_right(torch.nn.Identity(), data, torch.device("cpu")).tolist() == [3, 3]
    assert datautils.count_right(torch.nn.Identity(), [], torch.device("cpu")).tolist() == [0, 0]


@pytest.mark.parametrize("training", [True, False])
def test_count_right_evaluates_in_eval_mode(training):
    """Dropout is off while it counts, and the mode is what it was before."""
    model = torch.nn.Dropout(1.0).train(training)  # in train() mode it would answer only zeros
    data = [(torch.eye(3), torch.tensor([0, 1, 2]))]
    assert datautils.count_right(model, data, torch.device("cpu")).tolist() == [3, 3]
    assert model.training == training


THREADS = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, {scripts!r})
from multigpu_spawn import ddp_setup


def work(rank):
    torch.set_num_threads(6)
    ddp_setup(rank, 2, "cpu")
    sys.stdout.write(f"{{torch.get_num_threads()}}\\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    {unset}
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="{port}")
    mp.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize(
    ("unset", "threads"), [("del os.environ['OMP_NUM_THREADS']", "3"), ("", "6")]
)
def test_ranks_share_the_cores_unless_omp_num_threads_is_set(tmp_path, unset, threads):
    code = THREADS.format(scripts=str(SCRIPTS), unset=unset, port=free_port())
    (tmp_path / "threads.py").write_text(code)
    result = run(sys.executable, "threads.py", cwd=tmp_path)
    assert result.stdout.split() == [threads, threads], result.stderr


@pytest.fixture
def slurm_client(tmp_path):
    """Return the variables with which the real scontrol expands host lists, without a cluster."""
    if shutil.which("scontrol") is None:
        assert "CI" not in os.environ, "CI must install slurm-client"
        pytest.skip("no scontrol on this machine (Debian: apt-get install slurm-client)")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\n")
    return {"SLURM_CONF": str(conf)}


def adopt(env):
    """Return the variables that multinode_slurm.py sets from those of a Slurm step."""
    runpy.run_path(str(SCRIPTS / "multinode_slurm.py"))["adopt_slurm_step"](env)
    return env


def test_adopt_slurm_step(monkeypatch, slurm_client):
    monkeypatch.setenv("SLURM_CONF", slurm_client["SLURM_CONF"])
    env = adopt(dict(STEP))
    assert (env["RANK"], env["WORLD_SIZE"]) == ("6", "7")
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert env["MASTER_ADDR"] == "node2" and 10_000 <= int(env["MASTER_PORT"]) < 30_000
    assert adopt(STEP | {"SLURM_STEP_ID": "2"})["MASTER_PORT"] != env["MASTER_PORT"]
    assert adopt(STEP | {"SLURM_GTIDS": "0,1,2"})["LOCAL_WORLD_SIZE"] == "3"
    assert adopt({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})["WORLD_SIZE"] == "1"  # no step


def test_a_launcher_without_local_world_size_is_refused_outside_a_step():
    """Enroot's hook for PyTorch sets the variables of the ranks, but not this one."""
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    with pytest.raises(SystemExit, match="LOCAL_WORLD_SIZE is not set"):
        adopt(dict(rank))
    env = adopt(STEP | rank | {"MASTER_ADDR": "10.0.0.1"})
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("6", "7", "1")


def test_adopt_slurm_step_keeps_an_address_that_is_set():
    """Then it needs no scontrol, which containers often lack."""
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000", "PATH": ""}
    env = adopt(STEP | own)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "4000")


def test_make_names_its_targets(tmp_path):
    shown = run("make", "-C", ROOT, cwd=tmp_path).stdout
    for target in ("setup", "single", "multigpu", "torchrun", "slurm", "test", "lint", "clean"):
        name = f"run-{target}" if target in ("single", "multigpu", "torchrun", "slurm") else target
        assert f"  {name} " in shown
