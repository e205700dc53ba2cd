"""The Makefile's targets leave no file out."""

import re
from pathlib import Path

from harness import ROOT
from mutants import MUTATIONS

import ddp_ref

PACKAGE = Path(ddp_ref.__file__).parent
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_mutations_fit_the_package():
    """The text that each replaces occurs once in its file, and no file is left out."""
    for mutation in MUTATIONS:
        assert (PACKAGE / mutation.file).read_text().count(mutation.old) == 1, mutation
        assert all((ROOT / test).is_file() for test in re.findall(r"tests/\S+", mutation.tests))
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    left_out = files - {mutation.file for mutation in MUTATIONS}
    assert {file for file in left_out if "__" not in file} == set()
    assert f"break the package in {len(MUTATIONS)} ways" in MAKEFILE


def test_fake_gpus_run_every_file_with_gpu_tests():
    marked = {
        path.name
        for path in (ROOT / "tests").glob("test_*.py")
        if re.search(r"^(@|pytestmark = )pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
    }
    (command,) = re.findall(r"pytest -m gpu -n 4 (.*) \$\(ARGS\)", MAKEFILE)
    assert marked == {Path(file).name for file in command.split()}
