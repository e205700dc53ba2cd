"""The Makefile's targets leave no file out."""

import re
import sys
from pathlib import Path

from harness import ROOT, run

import ddp_ref

PACKAGE = Path(ddp_ref.__file__).parent
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_mutations_fit_the_package(tmp_path):
    """The text that each replaces occurs once in its file, and no file is left out."""
    ended = run(sys.executable, ROOT / "tests" / "mutants.py", "--list", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    broken = set(re.findall(r"^    ([\w/]+\.py), ", ended.stdout, re.MULTILINE))
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    assert {file for file in files - broken if "__" not in file} == set()
    mutations = len(re.findall(r"^[\w-]+: ", ended.stdout, re.MULTILINE))
    assert f"break the package in {mutations} ways" in MAKEFILE


def test_fake_gpus_run_every_file_with_gpu_tests():
    marked = {
        path.name
        for path in (ROOT / "tests").glob("test_*.py")
        if re.search(r"^(@|pytestmark = )pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
    }
    (command,) = re.findall(r"pytest -m gpu -n 4 (.*) \$\(ARGS\)", MAKEFILE)
    assert marked == {Path(file).name for file in command.split()}
