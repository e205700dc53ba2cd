"""What the scripts share: the data, the accuracy, the command line, and files that are not lost."""

import signal
import sys

import pytest
import torch
from harness import Evil, run
from torch import nn

import datautils


def test_digits():
    parts = [datautils.MyTrainDataset(), datautils.MyTrainDataset(train=False)]
    for part, size in zip(parts, (1440, 357), strict=True):
        assert part.images.shape == (len(part), 64) == (size, 64)
        assert part.images.min() == 0 and part.images.max() == 1
        share = torch.bincount(part.digits) / size  # each digit is a tenth of both parts
        torch.testing.assert_close(share, torch.full((10,), 0.1), rtol=0, atol=5e-3)
    images = torch.cat([part.images for part in parts])
    assert len(images.unique(dim=0)) == 1797  # no image is in both parts
    assert torch.equal(datautils.MyTrainDataset().images, parts[0].images)  # in every process
    with pytest.raises(TypeError):
        datautils.MyTrainDataset(2048)  # the tutorial series' number of samples


def test_count_right():
    """It counts all items, and turns dropout off."""
    model = nn.Dropout(1.0).train()  # in train() mode, it would answer only zeros
    data = [(torch.eye(3), torch.tensor([0, 1, 1])), (torch.eye(3)[2:], torch.tensor([2]))]
    assert datautils.count_right(model, data, torch.device("cpu")).tolist() == [3, 4]


def test_a_wrong_value_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", "--nproc", "-1"])
    with pytest.raises(SystemExit) as ended:
        datautils.parse_args("Train.", nproc=True)
    said = "script.py: error: nproc must be at least 1, not -1\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, said)


KILLED = """if True:
    import resource, signal, torch, datautils
    datautils.save("checkpoint.pt", {"weight": torch.ones(2)}, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    datautils.save("checkpoint.pt", {"weight": torch.zeros(100_000)}, 2)
"""


def test_a_crash_during_a_save_leaves_the_old_file(tmp_path):
    """The kernel kills the process when it has written 100 kB of 400."""
    ended = run(sys.executable, "-c", KILLED, cwd=tmp_path)
    assert (ended.code, ended.stdout) == (-signal.SIGXFSZ, "saved checkpoint.pt after epoch 1\n")
    [temporary] = tmp_path.glob("checkpoint.pt.*.tmp")
    assert temporary.stat().st_size == 100_000
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert torch.equal(saved["weight"], torch.ones(2))


def test_load_takes_a_snapshot_of_this_model_only(tmp_path, monkeypatch):
    """Anything else is one line, and no code in a file runs."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    assert datautils.load("snapshot.pt", model) is None
    snapshot = {"model": nn.Linear(2, 2).state_dict(), "optimizer": {}, "epochs_run": 5}
    for content in (
        snapshot | {"model": nn.Linear(3, 2).state_dict()},
        snapshot["model"],  # a checkpoint has weights alone
        snapshot | {"code": Evil(tmp_path / "made")},
    ):
        torch.save(content, "snapshot.pt")
        with pytest.raises(SystemExit, match=r"^error: snapshot\.pt .* snapshot of this model.*$"):
            datautils.load("snapshot.pt", model)
    assert not (tmp_path / "made").exists()
    torch.save(snapshot, "snapshot.pt")
    assert datautils.load("snapshot.pt", model) == {"optimizer": {}, "epochs_run": 5}
    torch.testing.assert_close(model.state_dict(), snapshot["model"], rtol=0, atol=0)
