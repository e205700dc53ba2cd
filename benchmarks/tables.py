"""How the results of a benchmark are shown: tables, notes and a figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from page import machine, put_between
from side_by_side import AGAIN, Row, control, spread

if TYPE_CHECKING:  # it is loaded to draw: mp.spawn's processes, which are timed, load this module
    from matplotlib.axes import Axes

PACKAGES = ("torch", "accelerate", "lightning", "pytorch-ignite")  # whose versions are printed
VERDICTS = {True: "reached", False: "missed", None: "too much noise to tell"}
UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6}
WITH_FIGURE = ("steps",)  # has many rows; you can read the other tables without a figure


@dataclass(frozen=True)
class Table:
    """Variants that were measured side by side, and notes about them, such as goals."""

    title: str
    rows: Sequence[Row]
    notes: Sequence[str]

    @property
    def base(self) -> str:
        """What all others are compared with."""
        return control(self.rows).name.removesuffix(AGAIN)


def goal(target: str, measured: str, reached: bool | None) -> str:
    """Return a line about a goal; `reached` is None if the noise hides whether it was reached."""
    return f"Goal: {target}. Measured: {measured} ({VERDICTS[reached]})."


def markdown(table: Table) -> str:
    """Return the table in Markdown, with its notes below."""
    lines = [[table.title, "median", f"ratio to {table.base}", "95 % interval"]]
    for row in table.rows:
        interval = f"{number(row.low)} to {number(row.high)}"
        lines.append([row.name, duration(row.seconds), number(row.ratio), interval])
    noise = f"Noise: {spread(table.rows):.1%}."
    return f"{grid(lines)}\n\n" + "\n".join(f"- {line}" for line in (noise, *table.notes))


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as a Markdown table; the first row is its head."""
    lines = [rows[0], ["---", *["--:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(ratio: float) -> str:
    """Return a ratio with as many digits as are meaningful."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.3f}"


def duration(seconds: float, digits: int = 3) -> str:
    """Return seconds in the unit that suits them, with that many significant digits."""
    rounds_to_1 = 1 - 0.5 / 10**digits  # 0.9996 ms is written as 1 ms, not as 1000 µs
    unit, factor = next((u, f) for u, f in UNITS.items() if seconds >= rounds_to_1 * f or u == "µs")
    return f"{float(f'{seconds / factor:.{digits}g}'):g} {unit}"


def difference(ratio: float, base: float) -> str:
    """Return how much longer than the base's median `base` a variant with this ratio takes."""
    seconds = (ratio - 1) * base
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def draw(tables: Sequence[Table], path: Path) -> None:
    """Draw the ratios of each table, its control's spread as a band."""
    from matplotlib.figure import Figure

    heights = [len(table.rows) + 1.5 for table in tables]
    figure = Figure((8, 0.32 * sum(heights)), layout="constrained")
    every = figure.subplots(len(tables), height_ratios=heights, squeeze=False)
    for axes, table in zip(every.flat, tables, strict=True):
        draw_ratios(axes, table)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)


def draw_ratios(axes: "Axes", table: Table) -> None:
    rows = list(table.rows)
    noise = spread(rows)
    axes.axvspan(1 - min(noise, 0.99), 1 + noise, color="C7", alpha=0.3)
    axes.axvline(1, color="k", linewidth=0.8)
    for place, row in enumerate(rows):
        color = "C7" if row.name.endswith(AGAIN) else "C1" if "Handler" in row.name else "C0"
        axes.plot([row.low, row.high], [place, place], color=color)
        axes.plot(row.ratio, place, "o", color=color)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"time, {table.base} = 1")
    axes.set_title(table.title, fontsize="medium", loc="left")
    axes.grid(axis="x", alpha=0.3)


def write_section(page: Path, name: str, about: str, tables: Sequence[Table], rounds: int) -> None:
    """Put the results of benchmark `name` between its marks in `page`, some with a figure."""
    parts = [about, *map(markdown, tables)]
    if name in WITH_FIGURE:
        figure = Path("figures") / f"benchmark-{name}.svg"
        draw(tables, page.parent / figure)
        parts.append(
            f"![The ratios of the tables above, with their intervals.]({figure.as_posix()})"
        )
    parts.append(f"`bench.py {name} --rounds={rounds}` on {machine(PACKAGES)}.")
    put_between(page, *marks(name), "\n\n".join(parts))


def marks(name: str) -> tuple[str, str]:
    """Return the lines of a page between which benchmark `name` writes."""
    return f"<!-- begin of what bench.py has written: {name} -->", f"<!-- end: {name} -->"
