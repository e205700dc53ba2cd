"""What the drill tells: the tables of outcomes and of costs, and how to repeat the rounds."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from page import machine, put_between
from plan import FAULTS
from rounds import TOO_LATE, WRONG, Played

MARKS = "<!-- begin of what the drill has written -->", "<!-- end -->"
TAIL = 40  # lines of what a failed round has written


def table(rounds: Sequence[Played]) -> str:
    """Return a Markdown table: a row for each fault and rank, a column for each launcher."""
    columns = sorted({played.plan.how for played in rounds})
    cells: dict[tuple[str, str, str], Counter[str]] = {}
    for played in rounds:
        plan = played.plan
        cells.setdefault((plan.fault, plan.target, plan.how), Counter())[played.outcome] += 1
    lines = [["fault", "rank", *columns]]
    for fault, target in sorted({key[:2] for key in cells}, key=_order):
        found = [cells.get((fault, target, how), Counter()) for how in columns]
        lines.append([fault, target, *map(_cell, found)])
    return aligned(lines)


def costs(rounds: Sequence[Played]) -> str:
    """Return a Markdown table: for each fault the median and the maximum of what it has cost."""
    lines = [["fault", "rounds", "job ended after", "training resumed after", "steps lost"]]
    for fault in FAULTS:
        hit = [p for p in rounds if p.outcome not in (WRONG, TOO_LATE)]
        own = [p.cost for p in hit if p.plan.fault == fault]
        if own:
            ended, resumed = (cost.ended for cost in own), (cost.resumed for cost in own)
            steps = _median_and_maximum((cost.steps for cost in own), ".0f")
            times = [_median_and_maximum(seconds, ".1f", " s") for seconds in (ended, resumed)]
            lines.append([fault, str(len(own)), *times, steps])
    return aligned(lines)


def _median_and_maximum(values: Iterable[float | None], digits: str, unit: str = "") -> str:
    present = [value for value in values if value is not None]
    return f"{median(present):{digits}} / {max(present):{digits}}{unit}" if present else ""


def aligned(lines: list[list[str]]) -> str:
    """Return the Markdown table with these lines, the first of which is its head."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths) for line in lines)


def _order(row: tuple[str, str]) -> tuple[int, str]:
    return FAULTS.index(row[0]), row[1]


def _cell(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def summary(rounds: Sequence[Played]) -> str:
    """Return how many rounds ended how."""
    outcomes = Counter(played.outcome for played in rounds)
    return f"{len(rounds)} rounds: {_cell(outcomes)}"


def tail(played: Played) -> str:
    """Return what went wrong in a round: the reason, and the end of what the job wrote."""
    reason, *text = played.detail.splitlines() or [""]
    return "\n".join(f"    {line}" for line in [reason, *text[-TAIL:]])


def write_markdown(path: Path, rounds: Sequence[Played], commands: Sequence[str]) -> None:
    """Put the tables between the marks in `path`, and the commands they were made with."""
    drawn = {played.plan.fault for played in rounds}
    missed = ", ".join(fault for fault in FAULTS if fault not in drawn)
    found = f"{summary(rounds)}." + (f" Not drawn: {missed}." if missed else "")
    days = [played.day for played in rounds]
    span = " to ".join(sorted({min(days), max(days)}))
    where = machine(["torch"]).rpartition(", ")[0]  # it ends with today's date
    about = ",\n".join(f"`{command}`" for command in commands) + f"\non {where}, {span}"
    put_between(path, *MARKS, "\n\n".join([about, found, table(rounds), costs(rounds)]))
