"""What the drill tells: the table of fault x rank x launcher x outcome, and how to repeat."""

import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from plan import FAULTS
from rounds import Played

BEGIN, END = "<!-- begin of what the drill has written -->", "<!-- end -->"
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


def around_marks(path: Path) -> tuple[str, str]:
    """Return the text before and after the part of `path` that the drill writes."""
    head, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the line {END if begin else BEGIN}")
    return head, tail


def write_markdown(path: Path, rounds: Sequence[Played], command: str) -> None:
    """Put the table between the marks in `path`, and what it was made with."""
    head, tail = around_marks(path)
    drawn = {played.plan.fault for played in rounds}
    missed = ", ".join(fault for fault in FAULTS if fault not in drawn)
    found = f"{summary(rounds)}." + (f" Not drawn: {missed}." if missed else "")
    text = f"`{command}`\non {machine()}\n\n{found}\n\n{table(rounds)}"
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def machine() -> str:
    """Return what the rounds ran on."""
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return f"{system}, Python {platform.python_version()}, torch {torch.__version__}"
