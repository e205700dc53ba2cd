"""A rank is killed under torchrun. The run resumes from the snapshot and loses nothing."""

import re

import pytest
import torch
from harness import SCRIPTS, Running, free_port, run, torchrun
from torch.testing import assert_close

pytestmark = pytest.mark.full
EPOCHS = 12
# Otherwise, a rank that was restarted may look for the address of a dead one (pytorch#135712).
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def epochs_trained(text):
    return [int(number) for number in re.findall(r"epoch (\d+) \| loss", text)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the snapshot of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("unbroken")
    script = torchrun(2, SCRIPTS / "multigpu_torchrun.py")
    result = run(*script, str(EPOCHS), "1", cwd=folder)
    assert result.code == 0, result.stderr
    return torch.load(folder / "snapshot.pt", weights_only=True)


def test_killed_rank_is_restarted(tmp_path, unbroken):
    script = torchrun(2, SCRIPTS / "multigpu_torchrun.py", restarts=3)
    command = [*script, str(EPOCHS), "1"]
    with Running(*command, cwd=tmp_path, env=OWN_STORE) as running:
        running.wait_for("epoch 4 |")
        [rank] = [p for p in running.processes() if p.environ().get("RANK") == "0"]
        rank.kill()
        result = running.wait()
    assert result.code == 0, result.stderr
    first, done, second = re.split(r"resuming after epoch (\d+)", result.stdout)
    # Only an epoch that was not saved is trained again, and no epoch is left out.
    assert 3 <= int(done) < EPOCHS and epochs_trained(first)[-1] in (int(done), int(done) + 1)
    assert epochs_trained(second) == list(range(int(done) + 1, EPOCHS + 1))
    snapshot = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    assert snapshot["epochs_run"] == unbroken["epochs_run"] == EPOCHS
    assert_close(snapshot["model"], unbroken["model"], rtol=0, atol=0)
    momentum, expected = (each["optimizer"]["state"] for each in (snapshot, unbroken))
    assert_close(momentum, expected, rtol=0, atol=0)


def start_nodes(*folders):
    """Start one torchrun agent in each folder. To DDP, each agent is a node with two ranks."""
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-id=nodes"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    command = [*torchrun(2)[:3], *options, SCRIPTS / "multinode_slurm.py", str(EPOCHS), "1"]
    one, two = (Running(*command, cwd=folder) for folder in folders)
    with one, two:
        return one.wait(), two.wait()


def test_nodes_resume_from_the_same_snapshot(tmp_path, unbroken):
    """With another one on each node, or one without any, all ranks stop with one line."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    before = unbroken | {"epochs_run": EPOCHS - 1}
    torch.save(before, folders[0] / "snapshot.pt")
    said = "error: the nodes see different snapshots: train in a shared folder"
    for result in start_nodes(*folders):
        assert result.code == 1 and result.stderr.count(said) == 2, result.stderr
        assert epochs_trained(result.stdout) == [] and "RuntimeError" not in result.stderr
    torch.save(before, folders[1] / "snapshot.pt")
    results = start_nodes(*folders)
    assert [result.code for result in results] == [0, 0], results
    assert sorted(epochs_trained(result.stdout) for result in results) == [[], [EPOCHS]]
    ranks = [re.findall(r"rank (\d) on ", result.stdout) for result in results]
    assert sorted(map(sorted, ranks)) == [["0", "1"], ["2", "3"]]
