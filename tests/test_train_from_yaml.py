"""train_from_yaml.py runs alone and with --nproc; the drill also resumes it under torchrun.

It ends at the weights of the ladder's scripts.
"""

import re
import signal
import sys

import pytest
import torch
from harness import SCRIPTS, Running, run

SCRIPT, CONFIG = SCRIPTS / "train_from_yaml.py", SCRIPTS / "configs" / "digits.yaml"
EPOCHS = "training.num_epochs=3"
TEST = re.compile(r"test loss ([\d.]+) \| test accuracy ([\d.]+)\n")


def train(folder, *command, settings=(EPOCHS,)):
    """Run the script to its end in `folder` and return what it printed."""
    folder.mkdir(exist_ok=True)
    ended = run(*command, "--config", CONFIG, "--set", *settings, cwd=folder)
    assert ended.code == 0, ended.stderr
    assert TEST.fullmatch(ended.stdout), ended.stdout
    return ended.stdout


def saved(folder):
    return torch.load(folder / "runs/digits/step_000000069.pt", weights_only=True)["model"]


@pytest.fixture(scope="module")
def spawned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spawned") / "run"
    return train(folder, sys.executable, SCRIPT, "--nproc", "2"), folder


def test_two_ranks_end_at_the_weights_of_the_ladder(spawned, tmp_path):
    """They equal those of multigpu_spawn.py bit for bit, because ddp_ref changes no number.

    The script numbers its epochs from 1 and the package from 0, so a copy of it does that, too.
    """
    text, line = (SCRIPTS / "multigpu_spawn.py").read_text(), "set_epoch(epoch)"
    assert text.count(line) == 1
    script = tmp_path / "spawn.py"
    script.write_text(text.replace(line, "set_epoch(epoch - 1)"))
    ended = run(sys.executable, script, "3", "--nproc", "2", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    theirs = list(torch.load(tmp_path / "checkpoint.pt", weights_only=True).values())
    ours = list(saved(spawned[1]).values())
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    accuracy = re.findall(r"test accuracy ([\d.]+)", ended.stdout)[-1]
    assert TEST.fullmatch(spawned[0])[2] == accuracy and float(accuracy) > 0.9
    configuration = (spawned[1] / "runs/digits/config.yaml").read_text()
    assert configuration == CONFIG.read_text() + f"\n# --set {EPOCHS}\n"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--config", "none.yaml"], "error: [Errno 2] No such file or directory: 'none.yaml'"),
        (["--config", CONFIG, "--nproc", "0"], "error: --nproc must be at least 1, not 0"),
    ],
)
def test_a_mistake_is_one_line(flags, text, tmp_path):
    ended = run(sys.executable, SCRIPT, *flags, cwd=tmp_path)
    assert ended.code == 1 and text in ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and not ended.stdout


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ('RuntimeError(f"the own one of {rank}")', r"rank (\d): RuntimeError: the own one of \1"),
        ("KeyboardInterrupt", "rank [01] was interrupted"),
    ],
)
def test_each_rank_started_with_nproc_prints_its_own_error(tmp_path, failure, said):
    """mp.spawn shows only the first error, perhaps a peer's, and counts an interrupt as success."""
    script, line = tmp_path / "fails.py", "    setup_logging(rank)\n"
    text = SCRIPT.read_text()
    assert text.count(line) == 1
    script.write_text(text.replace(line, f"    raise {failure}\n"))
    ended = run(sys.executable, script, "--config", CONFIG, "--nproc", "2", cwd=tmp_path)
    assert ended.code == 1 and re.search(f"error: {said}\n", ended.stderr), ended.stderr


def test_a_signal_to_the_parent_reaches_the_ranks_which_save(tmp_path):
    settings = ["training.path=elsewhere", "--set", "training.num_epochs=9999"]
    command = [SCRIPT, "--config", CONFIG, "--nproc", "2", "--set", *settings]
    with Running(sys.executable, *command, cwd=tmp_path) as running:
        running.wait_for("epoch 2 |")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait().code == 143, running.text()
    step = re.search(r"ended by a signal at step (\d+)", running.text())
    assert step and (tmp_path / "elsewhere" / f"step_{int(step[1]):09}.pt").exists()
