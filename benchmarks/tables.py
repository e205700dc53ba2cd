"""How the results of a benchmark are shown: tables and notes, in Markdown."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from side_by_side import Row, noise

VERDICTS = {True: "reached", False: "missed", None: "too much noise to tell"}
UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6}


@dataclass(frozen=True)
class Table:
    """Variants that were measured side by side, and notes about them, such as goals."""

    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()


def goal(target: str, measured: str, reached: bool | None) -> str:
    """Return a line about a goal; `reached` is None if the noise hides whether it was reached."""
    return f"Goal: {target}. Measured: {measured} ({VERDICTS[reached]})."


def markdown(table: Table) -> str:
    """Return the table in Markdown, with its notes below."""
    lines = [[table.title, "median", f"ratio to {table.rows[0].name}", "95 % interval"]]
    for row in table.rows:
        interval = f"{number(row.low)} to {number(row.high)}"
        lines.append([row.name, duration(row.seconds), number(row.ratio), interval])
    notes = f"Noise: {noise(table.rows):.1%}.", *table.notes
    return f"{grid(lines)}\n\n" + "\n".join(f"- {line}" for line in notes)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as a Markdown table; the first row is its head."""
    lines = [rows[0], ["---", *["--:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def count(names: Iterable[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(Counter(names).items()))


def number(ratio: float) -> str:
    """Return a ratio with as many digits as are meaningful."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.3f}"


def duration(seconds: float, digits: int = 3) -> str:
    """Return seconds in the unit that suits them, with that many significant digits."""
    rounds_to_1 = 1 - 0.5 / 10**digits  # 0.9996 ms is written as 1 ms, not as 1000 µs
    unit, factor = next((u, f) for u, f in UNITS.items() if seconds >= rounds_to_1 * f or u == "µs")
    return f"{float(f'{seconds / factor:.{digits}g}'):g} {unit}"


def marks(name: str) -> tuple[str, str]:
    """Return the lines of a page between which benchmark `name` writes."""
    return f"<!-- begin of what bench.py has written: {name} -->", f"<!-- end: {name} -->"
