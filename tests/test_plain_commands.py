"""pytest works as a reader types it, without any flags of our make targets."""

import re
import sys

import pytest
from harness import ROOT, run

pytestmark = pytest.mark.full
PYTEST = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider"]


def collected(folder, *arguments):
    """Return the names of the tests that a command would run."""
    ended = run(*PYTEST, "--collect-only", "-q", *arguments, cwd=folder)
    assert ended.code in (0, 5), ended.stdout + ended.stderr
    return set(re.findall(r"::(\w+)", ended.stdout))


def test_long_tests_are_left_out_and_named_files_are_not(tmp_path):
    gpt, site = ROOT / "tests/test_char_gpt.py", ROOT / "docs/../tests/test_site.py"
    found = collected(tmp_path, gpt, site)
    assert "test_defaults" not in found and "test_no_paragraph_is_trained_on_and_validated" in found
    assert "test_every_page_loads_whole" in found
    full = collected(tmp_path, gpt, "-m", "full")
    assert "test_defaults" in full and not full & found
    assert collected(tmp_path, f"{gpt}::test_defaults") == {"test_defaults"}
