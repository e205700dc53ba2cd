"""Checks of what the user passes. Where ranks may differ, all of them raise the same error.

A rank that raised alone would leave the others waiting for it in their next collective.
"""

from ..collectives import exchange_objects


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


def raise_on_all_ranks(problem: str, distributed: bool) -> None:
    """Raise ValueError on all ranks if any rank has a `problem` (collective if `distributed`)."""
    for text in exchange_objects(problem) if distributed else [problem]:
        if text:
            raise ValueError(text)


def check_same(distributed: bool, **numbers: int | None) -> None:
    """Raise ValueError unless all ranks pass the same `numbers` (collective if `distributed`)."""
    every = exchange_objects(numbers) if distributed else [numbers]
    for what, number in numbers.items():
        if len(passed := {str(other[what]) for other in every}) > 1:
            raise ValueError(
                f"all ranks must have the same data, but this rank has {number} {what} (all ranks: "
                f"{' or '.join(sorted(passed))}): seed random data alike, read only complete files"
            )
