"""Report the rounds: the tables of outcomes and costs, and the output of a failed round."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from page import machine, put_between
from plan import FAULTS
from rounds import TOO_LATE, WRONG, RoundResult

MARKS = "<!-- begin of what the drill has written -->", "<!-- end -->"
TAIL = 40  # lines of a failed round's output


def outcome_table(rounds: Sequence[RoundResult]) -> str:
    """Return a Markdown table with a row per fault and rank, and a column per launcher."""
    columns = sorted({result.plan.launch for result in rounds})
    cells: dict[tuple[str, str, str], Counter[str]] = {}
    for result in rounds:
        plan = result.plan
        cells.setdefault((plan.fault, plan.target, plan.launch), Counter())[result.outcome] += 1
    rows = [["fault", "rank", *columns]]
    for fault, target in sorted({key[:2] for key in cells}, key=_order):
        outcomes = [cells.get((fault, target, launch), Counter()) for launch in columns]
        rows.append([fault, target, *map(_counts, outcomes)])
    return aligned(rows)


def cost_table(rounds: Sequence[RoundResult]) -> str:
    """Return a Markdown table with the median and the maximum of what each fault has cost."""
    rows = [["fault", "rounds", "job ended after", "checkpoint loaded after", "steps lost"]]
    for fault in FAULTS:
        hit = [result for result in rounds if result.outcome not in (WRONG, TOO_LATE)]
        costs = [result.cost for result in hit if result.plan.fault == fault]
        if costs:
            ended, resumed = (cost.ended for cost in costs), (cost.resumed for cost in costs)
            steps = _median_and_maximum((cost.steps for cost in costs), ".0f")
            times = [_median_and_maximum(seconds, ".1f", " s") for seconds in (ended, resumed)]
            rows.append([fault, str(len(costs)), *times, steps])
    return aligned(rows)


def _median_and_maximum(values: Iterable[float | None], digits: str, unit: str = "") -> str:
    present = [value for value in values if value is not None]
    return f"{median(present):{digits}} / {max(present):{digits}}{unit}" if present else ""


def aligned(rows: list[list[str]]) -> str:
    """Return a Markdown table with columns of equal width. The first row is its header."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _order(row: tuple[str, str]) -> tuple[int, str]:
    return FAULTS.index(row[0]), row[1]


def _counts(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def summary(rounds: Sequence[RoundResult]) -> str:
    """Return how many rounds had which outcome."""
    outcomes = Counter(result.outcome for result in rounds)
    return f"{len(rounds)} rounds: {_counts(outcomes)}"


def failure(result: RoundResult) -> str:
    """Return why a round failed, and the end of the job's output."""
    reason, *text = result.detail.splitlines() or [""]
    return "\n".join(f"    {line}" for line in [reason, *text[-TAIL:]])


def write_markdown(path: Path, rounds: Sequence[RoundResult], commands: Sequence[str]) -> None:
    """Put the tables between the marks in `path`, and the commands that run these rounds."""
    drawn = {result.plan.fault for result in rounds}
    missing = ", ".join(fault for fault in FAULTS if fault not in drawn)
    counts = f"{summary(rounds)}." + (f" Not drawn: {missing}." if missing else "")
    days = [result.day for result in rounds]
    span = " to ".join(sorted({min(days), max(days)}))
    where = machine(["torch"]).rpartition(", ")[0]  # without today's date
    about = ",\n".join(f"`{command}`" for command in commands) + f"\non {where}, {span}"
    parts = [about, counts, outcome_table(rounds), cost_table(rounds)]
    put_between(path, *MARKS, "\n\n".join(parts))
