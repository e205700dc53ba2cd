"""Report the rounds: the table of outcomes and costs, and the output of a failed round."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from page import machine, put_between
from plan import FAULTS
from rounds import RESUMED, STARTED_OVER, TOO_LATE, WENT_ON, WRONG, RoundResult

MARKS = "<!-- begin of what the drill has written -->", "<!-- end -->"
OUTCOMES = WENT_ON, RESUMED, STARTED_OVER, TOO_LATE
TAIL = 40  # lines of a failed round's output


def table(rounds: Sequence[RoundResult]) -> str:
    """Return a Markdown table with a row per fault: how its rounds ended, and what they have cost.

    A cost is a median and a maximum, of the rounds that ended right and whose fault was not too
    late.
    """
    rows = [["fault", "rounds", *OUTCOMES, "job ended after", "steps lost"]]
    for fault in FAULTS:
        own = [result for result in rounds if result.plan.fault == fault]
        if not own:
            continue
        counts = Counter(result.outcome for result in own)
        costs = [result.cost for result in own if result.outcome not in (WRONG, TOO_LATE)]
        ended = _median_and_maximum((cost.ended for cost in costs), ".1f", " s")
        steps = _median_and_maximum((cost.steps for cost in costs), ".0f")
        outcomes = [str(counts[outcome]) for outcome in OUTCOMES]
        rows.append([fault, str(len(own)), *outcomes, ended, steps])
    return aligned(rows)


def _median_and_maximum(values: Iterable[float | None], digits: str, unit: str = "") -> str:
    present = [value for value in values if value is not None]
    return f"{median(present):{digits}} / {max(present):{digits}}{unit}" if present else ""


def aligned(rows: list[list[str]]) -> str:
    """Return a Markdown table with columns of equal width. The first row is its header."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def summary(rounds: Sequence[RoundResult]) -> str:
    """Return how many rounds had which outcome."""
    return f"{len(rounds)} rounds: {_counts(result.outcome for result in rounds)}"


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items()))


def launchers(rounds: Sequence[RoundResult]) -> str:
    """Return how many rounds each launcher has run."""
    return f"By launcher: {_counts(result.plan.launch for result in rounds)}."


def failure(result: RoundResult) -> str:
    """Return why a round failed, and the end of the job's output."""
    reason, *text = result.detail.splitlines() or [""]
    return "\n".join(f"    {line}" for line in [reason, *text[-TAIL:]])


def write_markdown(path: Path, rounds: Sequence[RoundResult], commands: Sequence[str]) -> None:
    """Put the table between the marks in `path`, and the commands that run these rounds."""
    drawn = {result.plan.fault for result in rounds}
    missing = ", ".join(fault for fault in FAULTS if fault not in drawn)
    counts = f"{summary(rounds)}." + (f" Not drawn: {missing}." if missing else "")
    days = [result.day for result in rounds]
    span = " to ".join(sorted({min(days), max(days)}))
    where = machine(["torch"]).rpartition(", ")[0]  # without today's date
    about = ",\n".join(f"`{command}`" for command in commands) + f"\non {where}, {span}"
    put_between(path, *MARKS, "\n\n".join([about, counts, launchers(rounds), table(rounds)]))
