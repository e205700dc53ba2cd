"""The notebooks are paired, executed and short, and show every change of the scripts."""

import json
import sys
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path

import jupytext
import nbformat
import pytest
from harness import ROOT
from IPython.core.inputtransformer2 import TransformerManager
from lesson import myddp
from lesson.sources import changes

FOLDER = ROOT / "notebooks"
NAMES = sorted(source.stem for source in FOLDER.glob("[0-9][0-9]_*.md"))
# How many cells of a chapter have an output that is not compared. In 00, the initial weights are
# not seeded. In 08, find_hang.py prints process numbers. In 09, a model wrote it.
IGNORED = {"00": 1, "03": 1, "08": 1, "09": 1}
DIFFS = {
    "02_several_processes": ("single_gpu.py", "multigpu_spawn.py"),
    "03_torchrun": ("multigpu_spawn.py", "multigpu_torchrun.py"),
    "04_several_nodes": ("multigpu_torchrun.py", "multinode_slurm.py"),
    "09_ddp_ref": ("multinode_slurm.py", "train_reference.py"),
}


def executed(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(name):
    return [cell for cell in executed(name).cells if cell.cell_type == "code"]


def code_of(name):
    return "\n\n".join(cell.source for cell in code_cells(name))


def stubs_of(cell):
    """Return the functions and classes of a cell that the reader has to write."""
    if "NotImplemented" not in cell:
        return []
    definitions = myddp.definitions(TransformerManager().transform_cell(cell))
    return [stub for stub, code in definitions.items() if "NotImplemented" in code]


def test_the_course_has_11_chapters_and_stays_short():
    assert [name[:2] for name in NAMES] == [f"{number:02}" for number in range(11)]
    assert sum(len((FOLDER / f"{name}.md").read_text().split()) for name in NAMES) <= 28_000
    assert len([*(FOLDER / "lesson").glob("*.py")]) <= 24
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.rglob("*.py")) <= 3_300


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_that_of_its_source_and_executed_in_order(name):
    """`make notebooks` was run after the last edit of the source, and no cell failed."""
    source, notebook = [
        [(cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells]
        for notebook in (jupytext.read(FOLDER / f"{name}.md"), executed(name))
    ]
    assert source == notebook
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    text = json.dumps(outputs)  # has no path of this machine
    assert str(ROOT) not in text and str(Path.home()) + "/" not in text
    assert "site-packages" not in text or str(Path(sys.prefix)) not in text


@pytest.mark.parametrize("name", NAMES)
def test_exercises_are_not_yet_done_and_their_solutions_are_folded(name):
    """After each stub come its check and a folded solution, which test_exercises.py runs."""
    stubs = []
    for cell, solution in pairwise(executed(name).cells):
        stubs += stubs_of(cell.source) if cell.cell_type == "code" else []
        if cell.source.startswith("check("):
            assert cell.source == f"check({', '.join(stubs)})"
            name = f"{stubs[0]}: " if len(stubs) > 1 else ""
            assert [output["text"] for output in cell.outputs] == [f"{name}not yet\n"]
            begin = "<details>\n<summary>Solution</summary>\n\n```python\n"
            assert solution.cell_type == "markdown" and solution.source.startswith(begin)
            assert {*stubs} <= myddp.definitions(myddp.SOLUTION.findall(solution.source)[0]).keys()
            stubs = []
    assert not stubs, "a stub without a check"


@pytest.mark.parametrize("name", DIFFS)
def test_the_script_is_run_and_every_change_of_it_is_shown(name):
    assert f"scripts/{DIFFS[name][1]}" in code_of(name)
    shown = "\n".join(
        output["data"]["text/plain"]
        for cell in code_cells(name)
        for output in cell.outputs
        if "show_diff(" in cell.source
    )
    for change in changes(*DIFFS[name]):
        text = "\n".join(change.lines())
        assert text in shown, f"not shown, or the script has changed since: {text}"


def test_the_capstones_diff_is_that_of_its_files():
    """It begins at `main`, without line numbers: a blank line stands between two changes."""
    files = ROOT / "scripts/small_gpt.py", FOLDER / "exercises/small_gpt_ddp.py"
    before, after = (path.read_text().partition("def main(")[2].splitlines() for path in files)
    lines = [*unified_diff(before, after, n=0, lineterm="")][3:]
    diff = "\n".join("" if line.startswith("@@") else line for line in lines)
    assert f"```diff\n{diff}\n```" in (FOLDER / "09_ddp_ref.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_to_a_guess_is_folded(name):
    for guess, answer in pairwise(code_cells(name)):
        if guess.source.startswith("guess = None"):
            assert "hide-output" in answer.metadata.tags and "your guess" in answer.source


def test_only_the_listed_outputs_are_not_compared():
    ignored = {}
    for name in NAMES:
        tags = [tag for cell in code_cells(name) for tag in cell.metadata.get("tags", [])]
        assert set(tags) <= {"nbval-ignore-output", "hide-output"}
        assert "NBVAL_" not in code_of(name)
        if count := tags.count("nbval-ignore-output"):
            ignored[name[:2]] = count
    assert ignored == IGNORED
