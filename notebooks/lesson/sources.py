"""What changed between two scripts, purpose by purpose, and two functions next to each other."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from difflib import SequenceMatcher
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# Seen on white as on black.
COLORS = {"-": "background-color: rgba(248, 81, 73, 0.2)", "+": "", "@": "opacity: 0.6"}
COLORS["+"] = "background-color: rgba(46, 160, 67, 0.2)"


class Change(NamedTuple):
    """Neighboring lines that were removed and added, and the function that they are in."""

    place: str
    removed: list[str]
    added: list[str]

    def lines(self) -> list[str]:
        """Return the change as a diff shows it."""
        return [f"-{line}" for line in self.removed] + [f"+{line}" for line in self.added]


def show_diff(old: str, new: str, *words: str) -> None:
    """Show the changes from one script to another that contain one of `words`; without any, all."""
    lines, place = [], ""
    for change in changes(old, new):
        if words and not any(word in line for word in words for line in change.lines()):
            continue
        if change.place != place:
            place = change.place
            lines.append(f"@@ {place}")
        lines += change.lines()
    if not lines:
        raise ValueError(f"no change from {old} to {new} contains one of {words}")
    html = "".join(f"<span style='{COLORS.get(s[:1], '')}'>{escape(s)}</span>\n" for s in lines)
    _display({"text/html": f"<pre>{html}</pre>", "text/plain": "\n".join(lines)})


def changes(old: str, new: str) -> list[Change]:
    """Return what changed between two scripts, in the order of the file.

    If several functions were removed together, or replaced, each is a change of its own.
    """
    before, after = ((SCRIPTS / name).read_text().splitlines() for name in (old, new))
    old_places, new_places = _places(before), _places(after)
    found = []
    for what, i1, i2, j1, j2 in SequenceMatcher(None, before, after, False).get_opcodes():
        starts = [i1, *(i for i in range(i1 + 1, i2) if before[i] and not before[i - 1]), i2]
        for start, end in pairwise(starts) if what != "equal" else ():
            added = after[j1:j2] if end == i2 else []
            place = new_places[j1] if added else old_places[start]
            if end > start and old_places[start] != place:  # something else stands here now
                found.append(Change(old_places[start], before[start:end], []))
                start = end
            found.append(Change(place, before[start:end], added))
    return found


def show_beside(*functions: Callable[..., Any]) -> None:
    """Show the code of functions next to each other, without their docstrings."""
    sources = [_code_of(function) for function in functions]
    box = "<pre style='flex: 1; overflow-x: auto'>{}</pre>"
    html = "".join(box.format(escape(source)) for source in sources)
    html = f"<div style='display: flex; flex-wrap: wrap; gap: 1em'>{html}</div>"
    _display({"text/html": html, "text/plain": "\n".join(sources)})


def _code_of(function: Callable[..., Any]) -> str:
    source = textwrap.dedent(inspect.getsource(function))
    (definition,) = ast.parse(source).body
    lines, first = source.splitlines(), definition.body[0]  # type: ignore[attr-defined]
    if ast.get_docstring(definition):  # type: ignore[arg-type]
        del lines[first.lineno - 1 : first.end_lineno]
    return "\n".join(lines)


def _places(lines: list[str]) -> list[str]:
    """Return for each line the innermost function or class around it."""
    places = ["the top of the file"] * len(lines)
    for node in ast.walk(ast.parse("\n".join(lines))):  # outer ones come first
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If) and node.end_lineno:
            name = getattr(node, "name", 'if __name__ == "__main__"')
            if isinstance(node, ast.If) and node.col_offset:
                continue
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            places[first - 1 : node.end_lineno] = [name] * (node.end_lineno - first + 1)
    return places


def _display(data: dict[str, str]) -> None:
    from IPython.display import display  # here, as every rank imports this module

    display(data, raw=True)
