"""What a check of sanity.py says, as text that a cell can print."""

from collections.abc import Callable
from typing import Any


def verdict(check: Callable[..., None], *args: Any) -> str:
    """Call `check(*args)`; return "passed", or the line with which it raised.

    Collective, as the checks are: all ranks call it.
    """
    try:
        check(*args)
    except AssertionError as error:
        return str(error)
    return "passed"
