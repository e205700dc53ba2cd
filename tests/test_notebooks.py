"""The notebooks are paired, executed and short, and show every change of the scripts."""

import json
import os
import re
import sys
from difflib import unified_diff
from pathlib import Path

import jupytext
import nbformat
import pytest
from harness import ROOT, public_names
from lesson import hide_gpus
from lesson.sources import changes

FOLDER = ROOT / "notebooks"
NAMES = sorted(source.stem for source in FOLDER.glob("[0-9][0-9]_*.md"))
# How many cells of a chapter have an output that is not compared. In 00, the initial weights are
# not seeded. In 08, find_hang.py prints process numbers. In 09, a model wrote it.
IGNORED = {"00": 1, "08": 1, "09": 1}
DIFFS = {
    "02": ("single_gpu.py", "multigpu_spawn.py"),
    "03": ("multigpu_spawn.py", "multigpu_torchrun.py"),
    "04": ("multigpu_torchrun.py", "multinode_slurm.py"),
    "09": ("multinode_slurm.py", "train_reference.py"),
}
SCRIPTS = [("00", "minimal_ddp.py"), ("01", "single_gpu.py"), ("08", "find_hang.py")]
SCRIPTS += [("09", "char_gpt.py"), *((number, new) for number, (_, new) in DIFFS.items())]
CARD = ["The question", "Afterwards you can", "You need", "Time"]


def chapter(number):
    return next(name for name in NAMES if name.startswith(number))


def executed(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(name):
    return [cell for cell in executed(name).cells if cell.cell_type == "code"]


def text_of(cells, kind):
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == kind)


def test_the_course_has_11_chapters_and_stays_short():
    assert [name[:2] for name in NAMES] == [f"{number:02}" for number in range(11)]
    assert sum(len((FOLDER / f"{name}.md").read_text().split()) for name in NAMES) <= 30_000
    assert len([*(FOLDER / "lesson").glob("*.py")]) <= 24
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.rglob("*.py")) <= 3_000


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_matches_its_source(name):
    """`make notebooks` was run after the last edit of the source."""
    source = jupytext.read(FOLDER / f"{name}.md")
    pair = [
        [(cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells]
        for notebook in (source, executed(name))
    ]
    assert pair[0] == pair[1]


@pytest.mark.parametrize("name", NAMES)
def test_cells_were_executed_in_order_without_errors(name):
    counts = [cell.execution_count for cell in code_cells(name)]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in code_cells(name) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_and_its_cells_are_short(name):
    cells = executed(name).cells
    assert len(cells) <= 48
    long = [cell.source for cell in code_cells(name) if len(cell.source.splitlines()) > 15]
    assert not long, long[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_has_all_parts_of_a_lesson(name):
    """The parts are a guess that is compared, an assert and one exercise or two."""
    code = text_of(code_cells(name), "code")
    assert "guess = None" in code and re.search(r"^ *assert ", code, re.M)
    assert 1 <= code.count("return NotImplemented") <= 2


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_run_outside_this_repository(name):
    """They need torch, scikit-learn and the scripts; a cell that takes `lesson` can be skipped."""
    cells = [cell.source for cell in code_cells(name)]
    assert cells[0] == "%load_ext lesson"
    imports = re.findall(r"^ *(?:from|import) (\w+)[\w.]* import (.+)$", "\n".join(cells), re.M)
    names = [n for module, listed in imports if module == "lesson" for n in listed.split(", ")]
    assert len(names) <= 3
    assert name == "09_ddp_ref" or "ddp_ref" not in "\n".join(cells)


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_begins_and_ends_like_all_others(name):
    """It has a card at the top, three things to remember, and links to what comes next."""
    text = text_of(executed(name).cells, "markdown")
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
    cells = executed(name).cells
    stubs = [n for n, cell in enumerate(cells) if "return NotImplemented" in cell.source]
    assert stubs
    for number in stubs:
        stub, check, solution = cells[number : number + 3]
        function = re.search(r"def (\w+)\(", stub.source)[1]
        assert check.source == f"check({function})"
        assert [output["text"] for output in check.outputs] == ["not yet\n"]
        assert solution.cell_type == "markdown"
        assert solution.source.startswith("<details>\n<summary>Solution</summary>\n\n```python\n")
        assert f"def {function}(" in solution.source


@pytest.mark.parametrize("number", DIFFS)
def test_every_change_of_the_script_is_shown(number):
    shown = "\n".join(
        output["data"]["text/plain"]
        for cell in code_cells(chapter(number))
        for output in cell.outputs
        if "show_diff(" in cell.source
    )
    for change in changes(*DIFFS[number]):
        text = "\n".join(change.lines())
        assert text in shown, f"not shown, or the script has changed since: {text}"


@pytest.mark.parametrize(("number", "script"), SCRIPTS)
def test_the_script_is_run(number, script):
    code = text_of(code_cells(chapter(number)), "code")
    assert f"scripts/{script}" in code


def test_the_capstones_diff_is_that_of_its_files():
    """It begins at `main`, without line numbers: a blank line stands between two changes."""
    files = ROOT / "scripts/small_gpt.py", FOLDER / "exercises/small_gpt_ddp.py"
    before, after = (path.read_text().partition("def main(")[2].splitlines() for path in files)
    lines = [*unified_diff(before, after, n=0, lineterm="")][3:]
    diff = "\n".join("" if line.startswith("@@") else line for line in lines)
    assert f"```diff\n{diff}\n```" in (FOLDER / "09_ddp_ref.md").read_text()


def test_one_switch_shows_the_gpus_to_the_chapters(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("DDP_COURSE_GPUS", "1")
    for name in ("DDP_SHARE_GPUS", "SBATCH_EXPORT"):
        monkeypatch.setenv(name, "0")  # and is unset afterwards
    hide_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1" and os.environ["DDP_SHARE_GPUS"] == "1"
    monkeypatch.delenv("DDP_COURSE_GPUS")
    hide_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_chapter_09_names_everything_that_the_package_exports():
    text = text_of(executed(chapter("09")).cells, "markdown")
    named = set(re.findall(r"`(\w+)", text))  # `Handler.train` names Handler
    assert not public_names() - named


def test_only_the_listed_outputs_are_not_compared():
    counted = {
        name[:2]: sum("nbval-ignore-output" in c.metadata.get("tags", []) for c in code_cells(name))
        for name in NAMES
    }
    assert {number: count for number, count in counted.items() if count} == IGNORED
    for name in NAMES:  # and there is no other way to leave out an output
        tags = {tag for cell in code_cells(name) for tag in cell.metadata.get("tags", [])}
        assert tags <= {"nbval-ignore-output"}
        assert "NBVAL_" not in text_of(code_cells(name), "code")


@pytest.mark.parametrize("name", NAMES)
def test_outputs_have_no_path_of_this_machine(name):
    outputs = json.dumps([cell.outputs for cell in code_cells(name)])
    assert str(ROOT) not in outputs and str(Path.home()) + "/" not in outputs
    assert "site-packages" not in outputs or str(Path(sys.prefix)) not in outputs
