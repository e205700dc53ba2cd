"""The notebooks are paired, executed and short, and show every change of the scripts."""

import json
import os
import re
import sys
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path

import jupytext
import nbformat
import pytest
from harness import ROOT
from IPython.core.inputtransformer2 import TransformerManager
from lesson import hide_gpus, myddp
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
CARD = ["The question", "Afterwards you can", "You need", "Time"]


def executed(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(name):
    return [cell for cell in executed(name).cells if cell.cell_type == "code"]


def text_of(name, kind):
    return "\n\n".join(cell.source for cell in executed(name).cells if cell.cell_type == kind)


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
def test_a_chapter_is_short_and_has_all_parts_of_a_lesson(name):
    """The parts are a guess, an assert and one exercise or two. Chapter 01 has no exercise."""
    cells = [cell.source for cell in code_cells(name)]
    code = "\n\n".join(cells)
    guesses = sum(cell.startswith("guess = None") for cell in cells)  # each has its own cell
    assert len(executed(name).cells) - guesses <= 48
    assert [cell for cell in cells if len(cell.splitlines()) > 22] == []
    assert "guess = None" in code and re.search(r"^ *assert ", code, re.M)
    stages = [myddp.stage_of(stub) for cell in cells for stub in stubs_of(cell)]
    least = 0 if any(stages) or name == "01_one_device" else 1
    assert least <= stages.count(None) <= 2  # besides those of myddp.py
    # It runs outside this repository, with torch, scikit-learn and the scripts: a cell that takes
    # `lesson` can be skipped.
    assert cells[0] == "%load_ext lesson"
    imported = re.findall(r"from lesson[\w.]* import (.+)", code)
    assert sum(len(names.split(",")) for names in imported) <= 3
    assert name == "09_ddp_ref" or "ddp_ref" not in code


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_begins_and_ends_like_all_others(name):
    """It has a card at the top, three things to remember, and links to what comes next."""
    text = text_of(name, "markdown")
    rows = re.match(r"# \d\d .+\n\n\| \| \|\n\|---\|---\|\n((?:\|.+\|\n)+)", text)
    assert rows, "no card under the title"
    assert [row.split("|")[1].strip() for row in rows[1].splitlines()] == CARD
    remember = re.search(r"^## Three things to remember\n\n((?:.+\n?)+)", text, re.M)
    assert re.findall(r"^(\d)\. ", remember[1], re.M) == ["1", "2", "3"]
    for page in ("../docs/cheat-sheet.md", "../docs/cheat-sheet.md#glossary"):
        assert f"({page})" in text
    following = NAMES[NAMES.index(name) + 1 :][:1]
    assert all(f"Next: [{other[:2]}" in text and f"({other}.ipynb)" in text for other in following)


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
    assert f"scripts/{DIFFS[name][1]}" in text_of(name, "code")
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


@pytest.mark.parametrize(
    ("wanted", "gpus", "visible"), [("1", 2, "0,1"), ("1", 1, ""), ("0", 2, "")]
)
def test_one_switch_shows_two_gpus_to_the_chapters(wanted, gpus, visible, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("DDP_COURSE_GPUS", wanted)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    hide_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert ("fewer GPUs (1) than ranks (2)" in capsys.readouterr().out) == (gpus == 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_to_a_guess_is_folded(name):
    """The cell after a guess measures the answer, and has no assert that would give it away."""
    cells = code_cells(name)
    for guess, answer in pairwise(cells):
        if guess.source.startswith("guess = None"):
            assert len(guess.source.splitlines()) == 1 and not guess.outputs
            assert "hide-output" in answer.metadata.tags and "your guess" in answer.source
            assert not re.search(r"^ *assert ", answer.source, re.M)


def test_only_the_listed_outputs_are_not_compared():
    ignored = {}
    for name in NAMES:
        tags = [tag for cell in code_cells(name) for tag in cell.metadata.get("tags", [])]
        assert set(tags) <= {"nbval-ignore-output", "hide-output"}
        assert "NBVAL_" not in text_of(name, "code")
        if count := tags.count("nbval-ignore-output"):
            ignored[name[:2]] = count
    assert ignored == IGNORED
