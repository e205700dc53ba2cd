"""A typical mistake in a notebook's exercise gets the hint that is meant for it."""

import ast
import re
from importlib import import_module

import jupytext
import pytest
from exercises import all_exercises, check
from harness import ROOT
from IPython.core.inputtransformer2 import TransformerManager

pytestmark = pytest.mark.exercises
MISTAKES = {
    name: mistakes
    for path in sorted((ROOT / "notebooks/exercises").glob("chapter_*.py"))
    for name, mistakes in import_module(f"mistakes.{path.stem}").MISTAKES.items()
}
SOLUTION = re.compile(
    r"<details>\n<summary>Solution</summary>\n\n```python\n(.*?)```\n.*?</details>", re.DOTALL
)


def solutions():
    """Return the chapter and the code of each solution, by the name of its function."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.md")):
        for code in SOLUTION.findall(path.read_text()):
            name = re.findall(r"^def (\w+)\(", code, re.MULTILINE)[-1]
            assert name not in found, f"two solutions of {name}"
            found[name] = path, code
    return found


SOLUTIONS = solutions()


def imports_for(code, path):
    """Return those import statements of a chapter that `code` needs."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    found = []
    for cell in jupytext.read(path).cells:
        code = TransformerManager().transform_cell(cell.source)  # `!` and `%%` into Python
        for node in ast.parse(code).body if cell.cell_type == "code" else []:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
                found += [ast.unparse(node)] * bool(names & used)
    return "\n".join(found)


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_solution_is_right(name):
    """It runs with the imports of its chapter, as in a reader's notebook."""
    path, code = SOLUTIONS[name]
    names = {"__name__": "__main__"}
    exec(f"{imports_for(code, path)}\n{code}", names)
    assert check(names[name]) == "right"


def test_every_exercise_has_a_solution_and_two_mistakes_with_hints_of_their_own():
    assert SOLUTIONS.keys() == MISTAKES.keys() == all_exercises().keys()
    for name, mistakes in MISTAKES.items():
        assert len({hint for _, hint in mistakes}) == len(mistakes) >= 2, name


@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name in MISTAKES for n in range(len(MISTAKES[name]))]
)
def test_a_mistake_gets_its_hint(name, number, capsys):
    """Running the notebooks shows that a stub gets 'not yet'."""
    wrong, hint = MISTAKES[name][number]
    wrong.__name__ = name
    answer = check(wrong)
    assert answer.startswith("hint: ") and hint in answer
    others = [other for _, other in MISTAKES[name] if other != hint]
    assert not any(other in answer for other in others)
    assert capsys.readouterr().out == f"{answer}\n"
