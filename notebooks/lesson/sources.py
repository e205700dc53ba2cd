"""The real scripts in a notebook: one folded, or what changed between two, side by side."""

from difflib import SequenceMatcher, unified_diff
from html import escape
from itertools import zip_longest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
Hunk = list[tuple[str, int, int, int, int]]  # opcodes: what, and from where to where in both files

CELL = "vertical-align: top; text-align: left; white-space: pre-wrap; width: 50%; padding: 0 4px"
# Seen on white as on black.
COLORS = {"old": "background-color: rgba(248, 81, 73, 0.2)", "equal": ""}
COLORS["new"] = "background-color: rgba(46, 160, 67, 0.2)"


def show_script(name: str) -> None:
    """Show a script of the ladder, folded."""
    text = (SCRIPTS / name).read_text()
    title = f"scripts/{name}, {len(text.splitlines())} lines"
    html = f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"
    _display({"text/html": html, "text/plain": f"{title}\n\n{text}"})


def show_diff(old: str, new: str, first: int = 1, last: int | None = None) -> None:
    """Show what changed between two scripts, side by side: hunks `first` to `last`, or to the end.

    A hunk is what changed together, with one line before and after.
    """
    before, after = _lines(old), _lines(new)
    hunks = find_hunks(old, new)
    last = len(hunks) if last is None else last
    if not 1 <= first <= last <= len(hunks):
        raise ValueError(f"there are hunks 1 to {len(hunks)}, not {first} to {last}")
    tables, texts = [], []
    for number in range(first, last + 1):
        hunk = hunks[number - 1]
        tables.append(_table(number, hunk, before, after, (old, new)))
        texts.append(_text(number, hunk, before, after))
    _display({"text/html": "".join(tables), "text/plain": "\n".join(texts)})


def find_hunks(old: str, new: str) -> list[Hunk]:
    """Return what changed between two scripts, as groups of difflib's opcodes."""
    matcher = SequenceMatcher(None, _lines(old), _lines(new), autojunk=False)
    return list(matcher.get_grouped_opcodes(1))


def changed_lines(old: str, new: str, number: int) -> list[str]:
    """Return the lines that hunk `number`, from 1, removes and adds."""
    before, after = _lines(old), _lines(new)
    found = []
    for what, i1, i2, j1, j2 in find_hunks(old, new)[number - 1]:
        if what != "equal":
            found += before[i1:i2] + after[j1:j2]
    return found


def diff_text(old: str, new: str) -> str:
    """Return all hunks between two scripts, as `show_diff` shows them where there is no HTML."""
    before, after = _lines(old), _lines(new)
    hunks = enumerate(find_hunks(old, new), start=1)
    return "\n".join(_text(number, hunk, before, after) for number, hunk in hunks)


def _display(data: dict[str, str]) -> None:
    from IPython.display import display  # here, as every rank imports this module

    display(data, raw=True)


def _lines(name: str) -> list[str]:
    return (SCRIPTS / name).read_text().splitlines()


def _table(number: int, hunk: Hunk, before: list, after: list, names: tuple[str, str]) -> str:
    rows = [f"<tr><th colspan='2' style='text-align: left'>Hunk {number}</th></tr>"]
    cells = [f"<td style='{CELL}'><i>{name}</i></td>" for name in names]
    rows.append(f"<tr>{''.join(cells)}</tr>")
    for what, i1, i2, j1, j2 in hunk:
        for one, other in zip_longest(before[i1:i2], after[j1:j2]):
            rows.append(f"<tr>{_cell(one, what, 'old')}{_cell(other, what, 'new')}</tr>")
    style = "width: 100%; table-layout: fixed; font-family: monospace; font-size: 85%"
    return f"<table style='{style}'>{''.join(rows)}</table>"


def _cell(line: str | None, what: str, side: str) -> str:
    color = COLORS["equal" if what == "equal" or line is None else side]
    return f"<td style='{CELL}; {color}'>{escape(line or '')}</td>"


def _text(number: int, hunk: Hunk, before: list[str], after: list[str]) -> str:
    (_, i1, _, j1, _), (_, _, i2, _, j2) = hunk[0], hunk[-1]
    lines = unified_diff(before[i1:i2], after[j1:j2], n=1, lineterm="")
    changes = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return "\n".join([f"Hunk {number}", *changes, ""])
