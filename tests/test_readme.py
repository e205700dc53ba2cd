"""The README is right about the ladder's numbers, the commands and the sample output.

The table of names at the top of the reference is complete.
"""

import re
import sys
from itertools import pairwise

import pytest
from harness import ROOT, public_names, run
from test_ladder import LADDER, lines_changed

README = (ROOT / "README.md").read_text()


def test_lines_changed():
    for before, after in pairwise([*LADDER, "train_reference"]):
        added, removed = lines_changed(before, after)
        row = next(line for line in README.splitlines() if line.startswith(f"| [{after}.py]"))
        assert f"| +{added} -{removed} |" in row


def test_the_pages_stay_short():
    """The words and the number of pages are at most what was reached."""
    pages = [*(ROOT / "docs").rglob("*.md")]
    assert len(pages) <= 18
    assert sum(len(page.read_text().split()) for page in pages) <= 25_000
    assert len(README.split()) <= 1_200
    assert len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 900


TARGET = re.compile(r"^\| `make ([a-z-]+)` \| (.+) \|$", re.MULTILINE)


def what_make_runs(target, folder):
    """Return the commands of a target, as you would type them in the activated environment."""
    torch = ["TORCH=2.8.0"] if target == "test-torch" else []
    command = ["make", "-C", ROOT, "--dry-run", "--always-make", "--silent", target, *torch]
    printed = run(*command, cwd=folder).stdout
    printed = re.sub(r"\.venv[\w.-]*/(bin/)?", "", printed.replace("\\\n", " "))
    return " ".join(printed.replace("--quiet --disable-pip-version-check", "").split())


def test_contributing_shows_the_command_of_each_target(tmp_path):
    """The table for machines without make shows what make would run, and names every target."""
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    of_page = TARGET.findall(page)
    assert {target for target, _ in of_page} == set(targets[1].split()) - {"help", "setup"}
    assert set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", README)) <= set(targets[1].split())
    for target, shown in of_page:
        runs = what_make_runs(target, tmp_path)
        for command in re.findall(r"`([^`]+)`", shown):
            if " " in command and not command.startswith("make "):
                assert command in runs, (target, runs)
    (extras,) = re.findall(r"-e '\S+'", what_make_runs("setup", tmp_path))
    assert page.count(f"pip install -c constraints.txt {extras}") == 3


def test_the_reference_begins_with_all_names():
    reference = (ROOT / "docs" / "reference.md").read_text()
    table = reference[reference.index("| to | use |") : reference.index("\n## ")]
    names = re.findall(r"`(\w+)`", table)
    assert set(names) == public_names() - {"DistInfo", "LaunchInfo"}  # functions return these


@pytest.mark.full
def test_the_first_command_prints_what_the_readme_shows(tmp_path):
    """The last digits of a loss or an accuracy may differ."""
    shown = re.search(r"\$ make run-multigpu\n(.*?)\$ make test", README, re.DOTALL)
    for name in ("Makefile", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    result = run("make", "--old-file=.venv/.ready", "run-multigpu", cwd=tmp_path)
    assert result.code == 0, result.stderr
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    for line in shown[1].splitlines():
        if line.startswith("epoch"):
            same = next(other for other in printed if other.startswith(line.split("|")[0]))
            one, other = ([float(n) for n in re.findall(r"\d\.\d+", t)] for t in (line, same))
            assert len(one) == 2 and one == pytest.approx(other, abs=0.015)
        else:
            assert line in printed or line == "..."
    assert (tmp_path / "checkpoint.pt").exists()
