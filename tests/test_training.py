"""The four scripts train: real processes, real data, weights compared."""

import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import ROOT, SCRIPTS, Result, run, torchrun
from torch import nn

import datautils
from ddp_ref import Handler

EPOCH = re.compile(r"epoch (\d+) \| loss ([\d.]+) \| test accuracy ([\d.]+)")
DUMP = {"PYTHONPATH": str(ROOT / "tests" / "dump_weights")}
LAUNCHES = [
    ("multigpu_spawn", 1),
    ("multigpu_spawn", 2),
    pytest.param("multigpu_spawn", 3, marks=pytest.mark.full),
    pytest.param("multigpu_torchrun", 1, marks=pytest.mark.full),
    ("multigpu_torchrun", 2),
    pytest.param("multigpu_torchrun", 3, marks=pytest.mark.full),
    pytest.param("multinode_slurm", 1, marks=pytest.mark.full),
    pytest.param("multinode_slurm", 2, marks=pytest.mark.full),
    ("multinode_slurm", 3),
]


def command(script: str, nproc: int, *flags: str) -> list[str | Path]:
    """Return the command line that starts a script of the ladder in `nproc` processes."""
    path = SCRIPTS / f"{script}.py"
    if script == "single_gpu":
        return [sys.executable, path, *flags]
    if script == "multigpu_spawn":
        return [sys.executable, path, "--nproc", str(nproc), *flags]
    return torchrun(nproc, path, *flags)


def train(folder: Path, script: str, nproc: int, *flags: str) -> Result:
    """Run a script to its end in `folder`, not in its own folder, and return what it printed."""
    result = run(*command(script, nproc, *flags), cwd=folder, env=DUMP)
    assert result.code == 0, result.stderr
    return result


def history(text: str) -> list[tuple[int, float, float]]:
    """Return (epoch, loss, accuracy) of each line that reports an epoch."""
    return [(int(n), float(loss), float(acc)) for n, loss, acc in EPOCH.findall(text)]


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the model's weights in a checkpoint or a snapshot."""
    content = torch.load(path, weights_only=True)
    return content.get("model", content)


def mlp(features: int = 64, outputs: int = 10) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, outputs))


def accuracy(state: dict[str, torch.Tensor]) -> float:
    """Return the accuracy of the weights over the whole test split, in one batch."""
    model = mlp()
    model.load_state_dict(state)
    images, labels = datautils.digits("test").tensors
    return (model(images).argmax(dim=1) == labels).float().mean().item()


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def assert_learned(result: Result, saved: Path, seed: int = 0) -> None:
    """Check that the loss fell, the accuracy rose and fits the weights, and each weight changed."""
    epochs = history(result.stdout)
    assert [number for number, _, _ in epochs] == [1, 2, 3]
    assert epochs[-1][1] < epochs[0][1] / 2
    assert epochs[-1][2] > max(epochs[0][2], 0.9)
    state = weights(saved)
    assert epochs[-1][2] == pytest.approx(accuracy(state), abs=5e-5)
    torch.manual_seed(seed)
    start = mlp().state_dict()
    assert all(not torch.equal(state[name], start[name]) for name in start)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Handler(model, optimizer, nn.functional.cross_entropy).load(saved)
    assert_equal(model.state_dict(), state)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return what single_gpu.py reports for 3 epochs with a batch of 96, and its weights."""
    folder = tmp_path_factory.mktemp("one_process")
    result = train(folder, "single_gpu", 1, "--epochs", "3", "--batch-size", "96")
    return history(result.stdout), weights(folder / "checkpoint.pt")


def test_single(tmp_path):
    result = train(tmp_path, "single_gpu", 1, "--epochs", "3")
    assert "device: cpu | batch: 32 | steps per epoch: 45\n" in result.stdout
    assert_learned(result, tmp_path / "checkpoint.pt")


@pytest.mark.parametrize(("script", "nproc"), LAUNCHES)
def test_ranks(tmp_path, one_process, script, nproc):
    """Each script at 1, 2 and 3 ranks learns what one process with the whole batch learns."""
    batch = 96 // nproc
    result = train(tmp_path, script, nproc, "--epochs", "3", "--batch-size", str(batch))
    assert (
        "device: cpu (0 GPUs visible) | effective batch: 96 | steps per epoch: 15\n"
        in result.stdout
    )
    saved = tmp_path / ("checkpoint.pt" if script == "multigpu_spawn" else "snapshot.pt")
    assert_learned(result, saved)
    for rank in range(nproc):  # what rank 0 saved is what every rank has, bit for bit
        assert_equal(weights(saved), weights(tmp_path / f"weights_of_rank_{rank}.pt"))

    reported, reference = one_process
    for mine, theirs in zip(history(result.stdout), reported, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-4)  # the loss is the mean over all ranks
    for name, value in weights(saved).items():  # 45 steps; only the order of sums differs
        torch.testing.assert_close(value, reference[name], rtol=0, atol=1e-5)


def test_each_step_of_the_ladder_computes_the_same(tmp_path):
    """Spawn, torchrun and multinode give the same weights, bit for bit, at the same world size."""
    trained = []
    for script, name in [
        ("multigpu_spawn", "checkpoint.pt"),
        ("multigpu_torchrun", "snapshot.pt"),
        ("multinode_slurm", "snapshot.pt"),
    ]:
        folder = tmp_path / script
        folder.mkdir()
        train(folder, script, 2, "--epochs", "2", "--seed", "5")
        trained.append(weights(folder / name))
    assert_equal(trained[0], trained[1])
    assert_equal(trained[1], trained[2])


@pytest.mark.full  # test_readme.py runs the README's first command: this with the default seed
@pytest.mark.parametrize("seed", range(5))
def test_accuracy_with_defaults(tmp_path, seed):
    """Two CPU processes reach 96 % with each seed, and 97 % with the default one."""
    result = train(tmp_path, "multigpu_spawn", 2, "--seed", str(seed))
    assert history(result.stdout)[-1][2] >= (0.96 if seed else 0.97)


@pytest.mark.parametrize(
    ("script", "nproc"),
    [
        ("single_gpu", 1),
        pytest.param("multigpu_spawn", 2, marks=pytest.mark.full),
    ],
)
def test_toy(tmp_path, script, nproc):
    result = train(tmp_path, script, nproc, "--dataset", "toy", "--epochs", "8")
    first, *_, last = history(result.stdout)
    assert last[1] < first[1] / 10
    assert last[2] > 0.95


def test_saves_every_few_epochs_and_the_last(tmp_path):
    text = train(tmp_path, "single_gpu", 1, "--epochs", "5", "--save-every", "2").stdout
    assert re.findall(r"epoch (\d) \| saved", text) == ["2", "4", "5"]


@pytest.mark.parametrize("nproc", [0, 2])
def test_minimal_ddp(tmp_path, nproc):
    """Alone in an empty folder, it runs with plain python (nproc 0) and under torchrun."""
    shutil.copy(SCRIPTS / "minimal_ddp.py", tmp_path / "train.py")
    command = torchrun(nproc, "train.py") if nproc else [sys.executable, "train.py"]
    ended = run(*command, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    start, *epochs, proof = ended.stdout.splitlines()
    assert start == f"training in {nproc or 1} processes on cpu"
    losses = [float(line.split()[-1]) for line in epochs]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert proof == f"all {nproc or 1} processes on cpu hold the same weights"
    torch.manual_seed(0)
    state = torch.load(tmp_path / "minimal.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    model.load_state_dict(state)
    inputs = torch.randn(1000, 20)
    right = model(inputs).argmax(1) == (inputs.square().sum(1) > 20).long()
    assert right.float().mean() > 0.75  # on points that the model has not seen


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun does not set RANK: start with torchrun"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            "RANK is set, but not LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        ),
        ({"SLURM_NTASKS": "2"}, ""),  # an sbatch body without srun is one process
    ],
)
def test_minimal_ddp_under_other_launchers(tmp_path, env, message):
    ended = run(sys.executable, SCRIPTS / "minimal_ddp.py", cwd=tmp_path, env=env)
    assert ended.code == bool(message), ended.stderr
    assert ended.stderr.startswith(message) and len(ended.stderr.splitlines()) == bool(message)
