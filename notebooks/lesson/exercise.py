"""Exercises that check themselves: the reader's function runs on real ranks, and a line says how.

The answer is 'not yet' for a stub, 'right', or a hint that names the wrong behaviour.
"""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ddp_ref import run_ranks

NOT_YET, RIGHT = "not yet", "right"


class NotYetWritten(Exception):
    """The function returned NotImplemented, as its stub does."""


class Answer(str):
    """An answer that has been printed: a notebook does not show the value of the cell again."""

    def _ipython_display_(self) -> None:
        """Show nothing."""


@dataclass(frozen=True)
class Exercise:
    """A task for the reader.

    observe: called on every rank with the reader's function; returns what that did there.
    judge: called here with what the ranks returned, in rank order; returns a hint, or None for
        right. A hint names the behaviour that is wrong, not its repair.
    nproc: ranks. timeout: seconds; past it the answer is a hint too.
    """

    observe: Callable[[Callable[..., Any]], Any]
    judge: Callable[[list[Any]], str | None]
    nproc: int = 2
    timeout: float = 60

    def check(self, function: Callable[..., Any]) -> str:
        """Run `function` on the ranks, print the answer in one line, and return it."""
        answer = Answer(self._answer(function))
        print(answer)
        return answer

    def _answer(self, function: Callable[..., Any]) -> str:
        limit = timedelta(seconds=self.timeout)
        try:
            with redirect_stdout(io.StringIO()):  # what the ranks print, so that one line is left
                seen = run_ranks(_observed, self, function, nproc=self.nproc, timeout=limit)
        except NotYetWritten:
            return NOT_YET
        except TimeoutError:
            return f"hint: no end within {self.timeout} s: a rank waits for what never comes"
        except Exception as error:  # noqa: BLE001 - whatever the reader's code raises is the answer
            return f"hint: your function raised {type(error).__name__}: {_first_line(error)}"
        try:
            hint = self.judge(seen)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            hint = f"what came back is not of the kind that was asked for: {_first_line(error)}"
        return RIGHT if hint is None else f"hint: {hint}"


def _observed(exercise: Exercise, function: Callable[..., Any]) -> Any:
    """Observe the reader's function on one rank; a stub's answer is never taken for a result."""

    def attempt(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is NotImplemented:
            raise NotYetWritten
        return result

    return exercise.observe(attempt)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]
