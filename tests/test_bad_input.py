"""Bad input is refused with one line, before any training, and no file is lost."""

import errno
import os
import sys
import zipfile
from pathlib import Path
from pickle import PickleError

import pytest
import torch
from harness import SCRIPTS, Evil, Running, run

import datautils

KEYS = ("model", "optimizer", "epochs_run")


def parse(monkeypatch, *flags, nproc=0):
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    return datautils.parse_args("Train.", "checkpoint.pt", nproc)


@pytest.mark.parametrize("flag", ["--epochs", "--batch-size", "--save-every", "--lr", "--nproc"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many", "", "1" + 400 * "0"])
def test_bad_numbers_are_refused(monkeypatch, capsys, flag, value):
    with pytest.raises(SystemExit) as exit_:
        parse(monkeypatch, f"{flag}={value}", nproc=2)
    assert exit_.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert flag in line and value in line
    kinds = {"--lr": "a finite number above 0", "--nproc": "an integer from 1 to "}
    assert kinds.get(flag, "an integer from 1 to 2147483647") in line


@pytest.mark.parametrize("value", ["-1", "4294967296", "x"])
def test_a_bad_seed_is_refused(monkeypatch, capsys, value):
    with pytest.raises(SystemExit):
        parse(monkeypatch, f"--seed={value}")
    assert (
        f"--seed: needs an integer from 0 to 4294967295, not {value}\n" in capsys.readouterr().err
    )


def test_defaults(monkeypatch):
    args = vars(parse(monkeypatch, nproc=2))
    assert args == {
        "epochs": 20,
        "batch_size": 32,
        "save_every": 5,
        "lr": 0.1,
        "seed": 0,
        "device": "auto",
        "dataset": "digits",
        "checkpoint": Path("checkpoint.pt"),
        "nproc": 2,
    }


def make_bad_file(path: Path, kind: str) -> None:
    """Put something at `path` that a save must not overwrite."""
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("my thesis, all of it")
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("chapter.txt", "my thesis, all of it")
    elif kind == "cut":
        torch.save(torch.nn.Linear(64, 64).state_dict(), path)
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "code":
        torch.save({"weight": Evil(path.with_name("run"))}, path)
    elif kind == "tensor":
        torch.save(torch.zeros(3), path)
    elif kind == "nothing":
        torch.save({}, path)
    elif kind == "other keys":
        torch.save({"model": {}, "optimizer": {}}, path)


@pytest.mark.parametrize("keys", [(), KEYS])
@pytest.mark.parametrize(
    "kind", ["empty", "text", "zip", "cut", "code", "tensor", "nothing", "other keys"]
)
def test_not_a_checkpoint(tmp_path, kind, keys):
    path = tmp_path / "checkpoint.pt"
    make_bad_file(path, kind)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"^error: .* exists but is not a checkpoint .*$"):
        datautils.read_checkpoint(path, *keys)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_weights_and_snapshots_are_not_mixed_up(tmp_path):
    weights, snapshot = tmp_path / "weights.pt", tmp_path / "snapshot.pt"
    torch.save(torch.nn.Linear(2, 2).state_dict(), weights)
    torch.save(dict.fromkeys(KEYS, 1), snapshot)
    assert datautils.read_checkpoint(weights).keys() == {"weight", "bias"}
    assert datautils.read_checkpoint(snapshot, *KEYS) == dict.fromkeys(KEYS, 1)
    with pytest.raises(SystemExit):
        datautils.read_checkpoint(weights, *KEYS)
    with pytest.raises(SystemExit):
        datautils.read_checkpoint(snapshot)


@pytest.mark.parametrize("where", ["missing/checkpoint.pt", "file/checkpoint.pt", "folder"])
def test_unwritable_path(tmp_path, where):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit, match=r"^error: cannot write .*: (No such|Not a|Is a) .*$"):
        datautils.read_checkpoint(tmp_path / where)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any file")
def test_read_only(tmp_path):
    path = tmp_path / "checkpoint.pt"
    tmp_path.chmod(0o500)
    with pytest.raises(SystemExit, match=r"^error: cannot write .*: Permission denied$"):
        datautils.read_checkpoint(path)
    tmp_path.chmod(0o700)
    torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    path.chmod(0o400)
    with pytest.raises(SystemExit, match=r"^error: cannot write .*: Permission denied$"):
        datautils.read_checkpoint(path)


def test_a_name_too_long_for_a_temporary_file(tmp_path):
    with pytest.raises(SystemExit, match=r"^error: cannot write .*: File name too long$"):
        datautils.read_checkpoint(tmp_path / ("x" * 252))


def test_a_link_stays_a_link(tmp_path):
    real, link = tmp_path / "real" / "weights.pt", tmp_path / "link.pt"
    real.parent.mkdir()
    link.symlink_to(real)
    assert datautils.read_checkpoint(link) is None
    datautils.write_checkpoint(link, {"weight": torch.ones(2)})
    assert link.is_symlink() and datautils.read_checkpoint(real).keys() == {"weight"}


def test_a_file_system_that_cannot_sync_folders_is_no_reason_to_fail(tmp_path, fail_folder_sync):
    fail_folder_sync(errno.EINVAL)
    datautils.write_checkpoint(tmp_path / "checkpoint.pt", {"weight": torch.ones(2)})
    assert (tmp_path / "checkpoint.pt").exists()


def test_two_runs_in_one_folder_both_save(tmp_path):
    """Each save has a temporary file of its own, so the last one wins and the file is complete."""
    code = """if True:
        import sys, pathlib, torch, datautils
        for number in range(100):
            datautils.write_checkpoint(pathlib.Path("w.pt"), {"weight": torch.ones(1000)})
            assert datautils.read_checkpoint(pathlib.Path("w.pt"))["weight"].sum() == 1000
    """
    command = (sys.executable, "-c", code)
    with Running(*command, cwd=tmp_path) as one, Running(*command, cwd=tmp_path) as two:
        results = [one.wait(), two.wait()]
    assert [result.code for result in results] == [0, 0], results
    assert [path.name for path in tmp_path.glob("*w.pt*")] == ["w.pt"]


def test_weights_of_another_model_are_refused(tmp_path):
    path, model = tmp_path / "snapshot.pt", torch.nn.Linear(20, 1)
    datautils.check_fits(path, None, model)
    datautils.check_fits(path, {"model": model.state_dict()}, model)
    for other in (torch.nn.Linear(64, 10).state_dict(), {"a": torch.ones(1)}, {}, 1, {"weight": 1}):
        with pytest.raises(SystemExit, match=r"^error: .* holds another model's weights: .*$"):
            datautils.check_fits(path, {"model": other}, model)


@pytest.mark.parametrize(
    "value", [lambda: None, Path("a")], ids=["cannot be pickled", "torch.load rejects it"]
)
def test_a_failing_save_keeps_the_old_file(tmp_path, value):
    path = tmp_path / "checkpoint.pt"
    datautils.write_checkpoint(path, {"weight": torch.ones(2)})
    with pytest.raises(PickleError):
        datautils.write_checkpoint(path, {"weight": value})
    assert torch.equal(torch.load(path, weights_only=True)["weight"], torch.ones(2))
    assert list(tmp_path.iterdir()) == [path]


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    "script", ["single_gpu", "multigpu_spawn", "multigpu_torchrun", "multinode_slurm"]
)
@pytest.mark.parametrize(
    "flags", [("--epochs", "0"), ("--device", "cuda"), ("--checkpoint", "thesis.txt")]
)
def test_each_script_refuses_bad_input(tmp_path, script, flags):
    """The real script exits with one line and writes nothing. Its checks need no second rank."""
    (tmp_path / "thesis.txt").write_text("all of it")
    result = run(sys.executable, SCRIPTS / f"{script}.py", *flags, cwd=tmp_path, env=ALONE)
    assert result.code in (1, 2)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "error: " in result.stderr, result.stderr
    assert (tmp_path / "thesis.txt").read_text() == "all of it"
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize(
    ("cores", "nproc", "says"),
    [
        (2, 2, ""),
        (2, 3, "warning: --nproc 3 is slow: the processes share 2 CPU cores\n"),
        (2, 16, "warning: --nproc 16 is slow: the processes share 2 CPU cores\n"),
        (2, 17, "needs an integer from 1 to 16 (4 per CPU core, or 16 if that is more), not 17\n"),
        (8, 32, "warning: --nproc 32 is slow: the processes share 8 CPU cores\n"),
        (8, 2000, "from 1 to 32 (4 per CPU core, or 16 if that is more), not 2000\n"),
    ],
)
def test_more_processes_than_cores(monkeypatch, capsys, cores, nproc, says):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    if "not" in says:
        with pytest.raises(SystemExit):
            parse(monkeypatch, f"--nproc={nproc}", nproc=2)
    else:
        assert parse(monkeypatch, f"--nproc={nproc}", nproc=2).nproc == nproc
    error = capsys.readouterr().err
    assert error.endswith(says) and error.count("\n") == (says != "")


def test_torchrun_script_needs_torchrun(tmp_path):
    result = run(sys.executable, SCRIPTS / "multigpu_torchrun.py", cwd=tmp_path)
    assert result.code == 1
    assert result.stderr.startswith("error: RANK is not set: start this script with torchrun")
