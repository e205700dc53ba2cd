"""The ladder's scripts train: real processes, real data, weights compared."""

import os
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import ROOT, SCRIPTS, Result, Running, run, torchrun, wait_until
from torch import nn

import datautils
from ddp_ref import Handler

EPOCH = re.compile(r"epoch (\d+) \| loss ([\d.]+) \| test accuracy ([\d.]+)(\nsaved)?")
PATH = [str(ROOT / "tests" / "dump_weights"), os.environ.get("PYTHONPATH", "")]


def train(folder: Path, script: str, nproc: int, *arguments: str) -> Result:
    """Run a script to its end in `folder`, not in its own folder, and return what it printed."""
    path = SCRIPTS / f"{script}.py"
    command = torchrun(nproc, path)
    if script == "single_gpu" or (nproc == 1 and script == "train_reference"):
        command = [sys.executable, path]
    elif script == "multigpu_spawn":
        command = [sys.executable, path, "--nproc", str(nproc)]
    result = run(*command, *arguments, cwd=folder, env={"PYTHONPATH": os.pathsep.join(PATH)})
    assert result.code == 0, result.stderr
    return result


def history(text: str) -> list[tuple[int, float, float]]:
    """Return (epoch, loss, accuracy) of each line that reports an epoch."""
    return [(int(n), float(loss), float(acc)) for n, loss, acc, _ in EPOCH.findall(text)]


def saved_after(text: str) -> list[int]:
    """Return the epochs after which a line says that a file was saved."""
    return [int(epoch) for epoch, _, _, saved in EPOCH.findall(text) if saved]


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the model's weights in a checkpoint or a snapshot."""
    content = torch.load(path, weights_only=True)
    return content.get("model", content)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def test_the_defaults(tmp_path):
    """In 20 epochs, the accuracy rises to 97 %. The saved weights have it."""
    text = train(tmp_path, "single_gpu", 1).stdout
    assert text.startswith("processes: 1 | device: cpu | steps per epoch: 45\n")
    epochs = history(text)
    assert [number for number, _, _ in epochs] == [*range(1, 21)]
    assert saved_after(text) == [5, 10, 15, 20]
    assert epochs[0][2] < 0.9 and epochs[-1][2] >= 0.97
    model, test_set = mlp(), datautils.MyTrainDataset(train=False)
    model.load_state_dict(weights(tmp_path / "checkpoint.pt"))
    accuracy = (model(test_set.images).argmax(dim=1) == test_set.digits).float().mean().item()
    assert epochs[-1][2] == pytest.approx(accuracy, abs=5e-5)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return what one process reports for 3 epochs with a batch of 64, and its weights."""
    folder = tmp_path_factory.mktemp("one_process")
    result = train(folder, "multigpu_spawn", 1, "3", "--batch_size", "64")
    return history(result.stdout), weights(folder / "checkpoint.pt")


ON_SLURM = pytest.param("multinode_slurm", marks=pytest.mark.full)


@pytest.mark.parametrize("script", ["multigpu_spawn", "multigpu_torchrun", ON_SLURM])
def test_ranks(tmp_path, one_process, script):
    """Two processes with a batch of 32 learn what one process with a batch of 64 learns."""
    text = train(tmp_path, script, 2, "3", "2").stdout
    assert "processes: 2 | device: cpu | steps per epoch: 23\n" in text
    assert saved_after(text) == [2, 3]
    (file,) = tmp_path.glob("*t.pt")
    assert file.name == ("checkpoint.pt" if script == "multigpu_spawn" else "snapshot.pt")
    state = weights(file)
    for rank in range(2):  # what rank 0 saved is what every rank has, bit for bit
        assert_equal(state, type(state)(weights(tmp_path / f"weights_of_rank_{rank}.pt")))

    reported, reference = one_process
    for mine, theirs in zip(history(text), reported, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-4)  # the loss is the mean over all ranks
    for name, value in state.items():  # 69 steps; only the order of sums differs
        torch.testing.assert_close(value, reference[name], rtol=0, atol=1e-5)

    model = mlp()  # ddp_ref loads the file, too
    Handler(model, torch.optim.SGD(model.parameters()), nn.functional.cross_entropy).load(file)
    assert_equal(model.state_dict(), state)


def test_spawned_processes_use_one_thread(tmp_path):
    script = SCRIPTS / "multigpu_spawn.py"
    command = ["env", "-u", "OMP_NUM_THREADS", sys.executable, script, "100", "--nproc=2"]
    with Running(*command, cwd=tmp_path) as running:

        def ranks():
            return [p for p in running.processes() if "spawn_main" in " ".join(p.cmdline())]

        wait_until(lambda: len(ranks()) == 2)
        assert [rank.environ().get("OMP_NUM_THREADS") for rank in ranks()] == ["1", "1"]


def test_the_last_rung_stops_on_a_signal_and_resumes(tmp_path):
    """So does plain python, which trains in one process, and then has nothing left to train."""
    command = [*torchrun(2, SCRIPTS / "train_reference.py"), "9", "1000"]
    states = []
    for name, told in (("whole", False), ("broken", True)):
        folder = tmp_path / name
        folder.mkdir()
        if told:
            with Running(*command, cwd=folder) as running:
                running.wait_for("epoch 2 |")
                running.process.send_signal(signal.SIGTERM)
                stopped = running.wait()
            assert stopped.code and "ended by a signal at step" in stopped.stdout
        ended = run(*command, cwd=folder)
        assert ended.code == 0, ended.stderr
        assert "processes: 2 | device: cpu | steps per epoch: 23\n" in ended.stdout
        assert ("loaded checkpoints/step_" in ended.stdout) == told
        assert float(re.findall(r"\ntest accuracy (.+)\n", ended.stdout)[0]) > 0.9
        states.append(weights(folder / f"checkpoints/step_{9 * 23:09}.pt"))
    assert_equal(*states)
    alone = train(tmp_path / "whole", "train_reference", 1, "9").stdout
    assert "processes: 1 | device: cpu |" in alone and "nothing to train: 9 of 9" in alone


@pytest.mark.parametrize(
    ("script", "env", "message"),
    [
        ("single_gpu", {"LOCAL_WORLD_SIZE": "2"}, r"(\S+ )?error: .*(torchrun|python).*"),
        (
            "minimal_ddp",
            {"SLURM_STEP_NUM_TASKS": "2"},
            "srun does not set RANK: start with torchrun.*",
        ),
    ],
)
def test_a_wrong_launch_is_one_line(tmp_path, script, env, message):
    ended = run(sys.executable, SCRIPTS / f"{script}.py", cwd=tmp_path, env=env)
    assert ended.code in (1, 2) and ended.stdout == ""
    assert re.fullmatch(f"{message}\n", ended.stderr), ended.stderr


@pytest.mark.parametrize(("nproc", "env"), [(2, {}), (1, {"SLURM_NTASKS": "2"})])
def test_minimal_ddp(tmp_path, nproc, env):
    """It runs alone in an empty folder, also in an sbatch body without srun, as one process.

    No thread of its group is left when Python ends: dump_weights would end it with an error.
    """
    shutil.copy(SCRIPTS / "minimal_ddp.py", tmp_path / "train.py")
    command = torchrun(2, "train.py") if nproc == 2 else [sys.executable, "train.py"]
    ended = run(*command, cwd=tmp_path, env={"PYTHONPATH": PATH[0]} | env)
    assert ended.code == 0, ended.stderr
    start, *epochs, proof = ended.stdout.splitlines()
    assert start == f"training in {nproc} processes on cpu"
    losses = [float(line.split()[-1]) for line in epochs]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert proof == f"all {nproc} processes on cpu hold the same weights"
    assert torch.load(tmp_path / "minimal.pt", weights_only=True)["0.weight"].isfinite().all()
