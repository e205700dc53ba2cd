"""What the drill tells: the table of fault x rank x launcher x outcome, and how to repeat."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from page import machine, put_between
from plan import FAULTS
from rounds import Played

MARKS = "<!-- begin of what the drill has written -->", "<!-- end -->"
TAIL = 40  # lines of what a failed round has written


def table(rounds: Sequence[Played]) -> str:
    """Return a Markdown table: a row for each fault and rank, a column for each launcher."""
    columns = sorted({played.plan.how for played in rounds})
    cells: dict[tuple[str, str, str], Counter[str]] = {}
    for played in rounds:
        plan = played.plan
        cells.setdefault((plan.fault, plan.target, plan.how), Counter())[played.outcome] += 1
    lines = [["fault", "rank", *columns], ["---"] * (len(columns) + 2)]
    for fault, target in sorted({key[:2] for key in cells}, key=_order):
        found = [cells.get((fault, target, how), Counter()) for how in columns]
        lines.append([fault, target, *map(_cell, found)])
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


def write_markdown(path: Path, rounds: Sequence[Played], command: str) -> None:
    """Put the table between the marks in `path`, and what it was made with."""
    drawn = {played.plan.fault for played in rounds}
    missed = ", ".join(fault for fault in FAULTS if fault not in drawn)
    found = f"{summary(rounds)}." + (f" Not drawn: {missed}." if missed else "")
    about = f"`{command}`\non {machine(['torch'])}"
    put_between(path, *MARKS, f"{about}\n\n{found}\n\n{table(rounds)}")
