"""The table of the rounds: how they ended, and what the faults have cost."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from plan import FAULTS
from rounds import RESUMED, STARTED_OVER, TOO_LATE, WENT_ON, RoundResult
from tables import grid

OUTCOMES = WENT_ON, RESUMED, STARTED_OVER, TOO_LATE


def report(rounds: Sequence[RoundResult]) -> str:
    """Return the counts of the rounds, and a Markdown table with a row per fault.

    A cost is a median and a maximum, of the rounds that have one.
    """
    rows = [["fault", "rounds", *OUTCOMES, "job ended after", "steps lost"]]
    for fault in FAULTS:
        own = [result for result in rounds if result.plan.fault == fault]
        if not own:
            continue
        counts = Counter(result.outcome for result in own)
        ended = median_and_maximum((result.ended for result in own), ".1f", " s")
        steps = median_and_maximum((result.steps for result in own), ".0f")
        numbers = len(own), *(counts[outcome] for outcome in OUTCOMES)
        rows.append([fault, *map(str, numbers), ended, steps])
    outcomes = f"{len(rounds)} rounds: {count(result.outcome for result in rounds)}."
    launchers = f"By launcher: {count(result.plan.launch for result in rounds)}."
    return f"{outcomes}\n\n{launchers}\n\n{grid(rows)}"


def median_and_maximum(values: Iterable[float | None], digits: str, unit: str = "") -> str:
    present = [value for value in values if value is not None]
    return f"{median(present):{digits}} / {max(present):{digits}}{unit}" if present else ""


def count(names: Iterable[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(Counter(names).items()))
