"""What changed between two scripts, purpose by purpose."""

import ast
from difflib import SequenceMatcher
from html import escape
from pathlib import Path
from typing import NamedTuple

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
    """Return what changed between two scripts, in the order of the file."""
    before, after = ((SCRIPTS / name).read_text().splitlines() for name in (old, new))
    places = _places(after)
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    return [
        Change(places[min(j1, len(after) - 1)], before[i1:i2], after[j1:j2])
        for what, i1, i2, j1, j2 in matcher.get_opcodes()
        if what != "equal"
    ]


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
