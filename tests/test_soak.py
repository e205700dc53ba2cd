"""The soak: both runs end at the same weights and no process grows, or it says what is wrong."""

import sys

import pytest
import soak
from harness import ROOT, run

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--batch-size", "64", "--length", "9"]


@pytest.mark.full
def test_a_run_with_faults_ends_at_the_same_weights(tmp_path):
    """Of this seed, the first fault is SIGTERM under torchrun, the second one with --nproc."""
    page = tmp_path / "page.md"
    page.write_text("before\n" + "\n".join(soak.MARKS) + "\nafter")
    flags = ["--epochs", "30", "--every", "3", "--faults", "2", "--seed", "706", "--markdown"]
    flags += [page, "--", *SMALL]
    ended = run(sys.executable, ROOT / "drill" / "soak.py", *flags, cwd=tmp_path, timeout=400)
    assert ended.code == 0, ended.stdout + ended.stderr
    first, second, *_, last = [row for row in ended.stdout.splitlines() if row[:6] == "with-f"]
    assert "| torchrun | from scratch" in first and "| --nproc | from step_" in second
    assert all("| SIGTERM to the launcher | exit code " in line for line in (first, second))
    assert "| from step_" in last and "| exit code 0" in last
    assert "Both runs ended at the same weights and history, bit for bit" in page.read_text()
