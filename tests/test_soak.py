"""The soak: both runs end at the same weights, or it says what is wrong."""

import re
import sys

import pytest
from harness import ROOT, run


@pytest.mark.first
@pytest.mark.full
def test_a_run_with_faults_ends_at_the_same_weights(tmp_path):
    flags = ["--epochs", "4", "--every", "1", "--seed", "1"]
    ended = run(sys.executable, ROOT / "drill" / "soak.py", *flags, cwd=tmp_path, timeout=400)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert int(re.findall(r"and had (\d+) faults", ended.stdout)[0]) >= 1
    assert "Both runs ended at the same weights and history, bit for bit" in ended.stdout
