"""A rank is killed under torchrun. The run resumes from the snapshot and loses nothing."""

import os
import re
import signal

import pytest
import torch
from harness import SCRIPTS, Running, free_port, run, torchrun

EPOCHS = 12
FLAGS = ("--epochs", str(EPOCHS), "--save-every", "1")


def start(folder, script, restarts=0, flags=FLAGS):
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts else {}
    return Running(*torchrun(2, SCRIPTS / script, *flags, restarts=restarts), cwd=folder, env=env)


def kill_rank(running, rank):
    """Send SIGKILL to the process of one rank."""
    victims = [p for p in running.processes() if p.environ().get("RANK") == str(rank)]
    assert len(victims) == 1
    os.kill(victims[0].pid, signal.SIGKILL)


def epochs_trained(text):
    return [int(number) for number in re.findall(r"epoch (\d+) \| loss", text)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the snapshot of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("unbroken")
    result = run(*torchrun(2, SCRIPTS / "multigpu_torchrun.py", *FLAGS), cwd=folder)
    assert result.code == 0, result.stderr
    return torch.load(folder / "snapshot.pt", weights_only=True)


def assert_same(snapshot, unbroken):
    """Assert that model, optimizer state and number of epochs are equal, bit for bit."""
    assert snapshot["epochs_run"] == unbroken["epochs_run"] == EPOCHS
    for name, value in unbroken["model"].items():
        assert torch.equal(snapshot["model"][name], value)
    for index, state in unbroken["optimizer"]["state"].items():
        momentum = snapshot["optimizer"]["state"][index]["momentum_buffer"]
        assert torch.equal(momentum, state["momentum_buffer"])


@pytest.mark.parametrize(
    ("script", "rank"),
    [
        ("multigpu_torchrun.py", 0),
        pytest.param("multigpu_torchrun.py", 1, marks=pytest.mark.full),
        pytest.param("multinode_slurm.py", 1, marks=pytest.mark.full),
    ],
)
def test_killed_rank_is_restarted(tmp_path, unbroken, script, rank):
    with start(tmp_path, script, restarts=3) as running:
        running.wait_for("epoch 3 | saved")
        kill_rank(running, rank)
        result = running.wait()
    assert result.code == 0, result.stderr
    first, second = re.split(rf"snapshot.pt: \d+ of {EPOCHS} epochs are done", result.stdout)[1:]
    saved = int(re.findall(rf"snapshot.pt: (\d+) of {EPOCHS} epochs are done", result.stdout)[-1])
    printed = int(re.findall(r"epoch (\d+) \| saved", first)[-1])
    assert printed in (saved, saved - 1)  # it may be killed before it prints that it has saved
    assert 3 <= saved < EPOCHS
    # Only an epoch that was printed but not saved is trained again, and no epoch is left out.
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
    with start(tmp_path, "multigpu_torchrun.py") as running:  # the same command resumes
        assert running.wait().code == 0
    assert_same(torch.load(tmp_path / "snapshot.pt", weights_only=True), unbroken)


def test_a_finished_run_trains_no_more(tmp_path, unbroken):
    torch.save(unbroken, tmp_path / "snapshot.pt")
    with start(tmp_path, "multinode_slurm.py") as running:
        result = running.wait()
    assert result.code == 0
    assert f"snapshot.pt: {EPOCHS} of {EPOCHS} epochs are done" in result.stdout
    assert epochs_trained(result.stdout) == []
    assert_same(torch.load(tmp_path / "snapshot.pt", weights_only=True), unbroken)


def start_nodes(folders, flags, restarts=0):
    """Start one torchrun agent in each folder. To DDP, each agent is a node with two ranks."""
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes=2", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=nodes"]
    command = [*torchrun(2, "")[:3], *options, SCRIPTS / "multinode_slurm.py", *flags]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts else {}
    return [Running(*command, cwd=folder, env=env) for folder in folders]


def place(text):
    """Return the (rank, local rank) pairs that a node printed."""
    return re.findall(r"rank (\d) is local rank (\d) on ", text)


def test_two_nodes_without_a_common_folder(tmp_path, unbroken):
    """Local ranks repeat on each node, and ranks do not.

    All ranks resume from rank 0's snapshot. If its node has none, all start from scratch.
    """
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    torch.save(unbroken | {"epochs_run": EPOCHS - 1}, folders[0] / "snapshot.pt")
    one, two = start_nodes(folders, FLAGS)
    with one, two:
        results = [node.wait() for node in (one, two)]
    assert [result.code for result in results] == [0, 0], results
    places = [place(result.stdout) for result in results]
    assert [local for node in places for _, local in sorted(node)] == ["0", "1"] * 2
    assert sorted(rank for node in places for rank, _ in node) == ["0", "1", "2", "3"]
    main = 0 if ("0", "0") in places[0] else 1  # torchrun decides which node rank 0 is on
    expected = [EPOCHS] if main == 0 else list(range(1, EPOCHS + 1))
    assert epochs_trained(results[main].stdout) == expected
    assert epochs_trained(results[1 - main].stdout) == []


@pytest.mark.full
def test_killed_rank_of_two_nodes_is_restarted(tmp_path):
    """The agents count restarts differently, but all ranks meet again and no epoch is lost.

    The other node's ranks fail too, because their peer is gone, so one kill may cost two restarts.
    """
    flags = ("--epochs", "12", "--save-every", "1", "--batch-size", "8")
    one, two = start_nodes([tmp_path, tmp_path], flags, restarts=5)
    with one, two:
        first = {"0", "1"} & dict(place(one.wait_for(" on "))).keys()  # one printed rank is enough
        node = one if first else two
        node.wait_for("epoch 2 | saved")
        kill_rank(two if node is one else one, 3)
        results = [agent.wait() for agent in (one, two)]
    assert [result.code for result in results] == [0, 0], results
    assert len(re.findall("of 12 epochs are done", node.text())) >= 2
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["epochs_run"] == 12


@pytest.mark.parametrize("script", ["multigpu_torchrun.py", "multinode_slurm.py"])
def test_restarts_need_a_new_store_for_each_attempt(tmp_path, script):
    """Restarts that could hang are refused before the training, with one message."""
    result = run(*torchrun(2, SCRIPTS / script, restarts=2), cwd=tmp_path)
    assert result.code != 0
    assert result.stderr.count("run TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun") == 1
    assert result.stdout == ""
