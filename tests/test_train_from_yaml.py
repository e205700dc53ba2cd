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
COMMAND = (sys.executable, SCRIPT, "--config", CONFIG, "--nproc", "2")


@pytest.mark.full
def test_two_ranks_end_at_the_weights_of_the_ladder(tmp_path):
    """They equal those of multigpu_spawn.py bit for bit, because ddp_ref changes no number.

    The script numbers its epochs from 1 and the package from 0, so a copy of it does that, too.
    """
    epochs = "training.num_epochs=3"
    ours = run(*COMMAND, "--set", epochs, cwd=tmp_path)
    assert ours.code == 0, ours.stderr
    text, line = (SCRIPTS / "multigpu_spawn.py").read_text(), "set_epoch(epoch)"
    assert text.count(line) == 1
    script = tmp_path / "spawn.py"
    script.write_text(text.replace(line, "set_epoch(epoch - 1)"))
    theirs = run(sys.executable, script, "3", "--nproc", "2", cwd=tmp_path)
    assert theirs.code == 0, theirs.stderr
    folder = tmp_path / "runs" / "digits"
    saved = torch.load(folder / "step_000000069.pt", weights_only=True)["model"]
    expected = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    pairs = zip(saved.values(), expected.values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    accuracy = re.findall(r"test accuracy ([\d.]+)", theirs.stdout)[-1]
    test = re.fullmatch(r"test loss ([\d.]+) \| test accuracy ([\d.]+)\n", ours.stdout)
    assert test[2] == accuracy and float(accuracy) > 0.9
    configuration = (folder / "config.yaml").read_text()
    assert configuration == CONFIG.read_text() + f"\n# --set {epochs}\n"


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


@pytest.mark.full
def test_a_signal_to_the_parent_reaches_the_ranks_which_save(tmp_path):
    settings = ["training.path=elsewhere", "--set", "training.num_epochs=9999"]
    with Running(*COMMAND, "--set", *settings, cwd=tmp_path) as running:
        running.wait_for("epoch 2 |")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait().code == 143, running.text()
    step = re.search(r"ended by a signal at step (\d+)", running.text())
    assert step and (tmp_path / "elsewhere" / f"step_{int(step[1]):09}.pt").exists()
