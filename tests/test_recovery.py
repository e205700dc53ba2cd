"""A rank is killed under torchrun; the run goes on from the snapshot and loses nothing."""

import os
import re
import signal

import pytest
import torch
from harness import SCRIPTS, Running, run, torchrun

EPOCHS = 12
FLAGS = ("--epochs", str(EPOCHS), "--save-every", "1")


def start(folder, script, restarts=0, flags=FLAGS):
    return Running(*torchrun(2, SCRIPTS / script, *flags, restarts=restarts), cwd=folder)


def kill_rank(running, rank):
    """Send SIGKILL to the process of one rank."""
    victims = [p for p in running.processes() if p.environ().get("RANK") == str(rank)]
    assert len(victims) == 1
    os.kill(victims[0].pid, signal.SIGKILL)


def epochs_trained(text):
    return [int(number) for number in re.findall(r"epoch (\d+) \| loss", text)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the snapshot of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    result = run(*torchrun(2, SCRIPTS / "multigpu_torchrun.py", *FLAGS), cwd=folder)
    assert result.code == 0, result.stderr
    return torch.load(folder / "snapshot.pt", weights_only=True)


def assert_same(snapshot, unbroken):
    """Model, optimizer state and number of epochs are equal, bit for bit."""
    assert snapshot["epochs_run"] == unbroken["epochs_run"] == EPOCHS
    for name, value in unbroken["model"].items():
        assert torch.equal(snapshot["model"][name], value)
    for index, state in unbroken["optimizer"]["state"].items():
        momentum = snapshot["optimizer"]["state"][index]["momentum_buffer"]
        assert torch.equal(momentum, state["momentum_buffer"])


@pytest.mark.parametrize(
    ("script", "rank"),
    [("multigpu_torchrun.py", 0), ("multigpu_torchrun.py", 1), ("multinode_slurm.py", 1)],
)
def test_killed_rank_is_restarted(tmp_path, unbroken, script, rank):
    with start(tmp_path, script, restarts=3) as running:
        running.wait_for("epoch 3 | saved")
        kill_rank(running, rank)
        result = running.wait()
    assert result.code == 0, result.stderr
    text = result.stdout
    first, second = text.split("epochs: going on from there")
    saved = max(int(number) for number in re.findall(r"epoch (\d+) \| saved", first))
    assert f"snapshot.pt holds {saved} " in first
    assert 3 <= saved < EPOCHS
    # An epoch whose end was printed but not saved is trained again; no other, and none is left out.
    assert epochs_trained(second) == list(range(saved + 1, EPOCHS + 1))
    assert epochs_trained(first)[-1] in (saved, saved + 1)
    assert_same(torch.load(tmp_path / "snapshot.pt", weights_only=True), unbroken)


def test_killed_rank_without_restarts_ends_the_run(tmp_path, unbroken):
    with start(tmp_path, "multigpu_torchrun.py") as running:
        running.wait_for("epoch 2 | saved")
        kill_rank(running, 1)
        result = running.wait(timeout=60)
    assert result.code != 0
    assert "SIGKILL" in result.stderr  # torchrun's report names the cause
    with start(tmp_path, "multigpu_torchrun.py") as running:  # the same command goes on
        assert running.wait().code == 0
    assert_same(torch.load(tmp_path / "snapshot.pt", weights_only=True), unbroken)


def test_a_finished_run_trains_no_more(tmp_path, unbroken):
    torch.save(unbroken, tmp_path / "snapshot.pt")
    with start(tmp_path, "multinode_slurm.py") as running:
        result = running.wait()
    assert result.code == 0
    assert f"holds {EPOCHS} epochs" in result.stdout
    assert epochs_trained(result.stdout) == []
    assert_same(torch.load(tmp_path / "snapshot.pt", weights_only=True), unbroken)


def test_two_nodes(tmp_path, unbroken):
    """Two torchrun agents are two nodes; local ranks repeat, ranks do not; one snapshot is read."""
    apart = [tmp_path / "node0", tmp_path / "node1"]  # no common folder
    for folder in apart:
        folder.mkdir()
    torch.save(unbroken | {"epochs_run": EPOCHS - 1}, apart[0] / "snapshot.pt")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)  # meeting point of agents
    rendezvous = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{store.port}",
        "--rdzv-conf=is_host=false",
        "--rdzv-id=test",
    ]
    command = [*torchrun(1, "")[:3], *rendezvous, SCRIPTS / "multinode_slurm.py", *FLAGS]
    with Running(*command, cwd=apart[0]) as one, Running(*command, cwd=apart[1]) as two:
        texts = [running.wait() for running in (one, two)]
    assert [text.code for text in texts] == [0, 0], texts
    ranks = sorted(
        re.findall(r"rank (\d) is local rank (\d) on ", "".join(t.stdout for t in texts))
    )
    assert ranks == [("0", "0"), ("1", "0")]
    trained = [epochs_trained(text.stdout) for text in texts]
    assert sorted(trained) == [[], [EPOCHS]] or sorted(trained) == [[], list(range(1, EPOCHS + 1))]
