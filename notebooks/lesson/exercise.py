"""Exercises that check themselves: the reader's function runs on real ranks, and gets an answer.

The answer is one line: 'not yet' for a stub, 'right', or a hint that names the wrong behaviour.
"""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ddp_ref import run_ranks

from .partners import has_no_partner

NOT_YET, RIGHT = "not yet", "right"
SAME_CALLS = "Every rank must make the same collective calls, in the same order."
ALONE = f"a rank waited in a collective for another rank that never made that call. {SAME_CALLS}"
MISMATCH = f"the ranks brought tensors of different sizes to one collective. {SAME_CALLS}"


class NotYetWritten(Exception):
    """The function returned NotImplemented, as its stub does."""


class Answer(str):
    """An answer that was printed already, so a notebook does not show it a second time."""

    def _ipython_display_(self) -> None:
        """Show nothing."""


@dataclass(frozen=True)
class Exercise:
    """A task for the reader.

    Args:
        observe: Gets the reader's function, and returns what it did. Runs on every rank.
        judge: Runs in the notebook, with what the ranks returned, in rank order. It returns None
            if all is right, and otherwise a hint: what the function did, and what to think about.
        nproc: How many ranks to start. 0: `observe` runs in the notebook.
        timeout: Seconds after which the ranks are ended, and the answer is a hint as well.
        train: Runs on two ranks if `judge` returns None: trains with the reader's function and in
            PyTorch's way, and returns how far the weights were apart after each step.
    """

    observe: Callable[[Callable[..., Any]], Any]
    judge: Callable[[list[Any]], str | None]
    nproc: int = 2
    timeout: float = 60
    train: Callable[[Callable[..., Any]], list[float]] | None = None

    def check(self, function: Callable[..., Any]) -> str:
        """Run `function` on the ranks, print the answer in one line, and return it."""
        answer = Answer(self._answer(function))
        print(answer)
        return answer

    def _answer(self, function: Callable[..., Any]) -> str:
        printed = io.StringIO()
        try:
            # What the ranks print is not shown, so that the answer is one line.
            with redirect_stdout(printed):
                hint = self._judged(self._run(self.observe, function, self.nproc))
                if hint is None and self.train:
                    hint = _judge_training(self._run(self.train, function, 2))
        except (NotYetWritten, NotImplementedError):
            return NOT_YET
        except TimeoutError:
            return (
                f"hint: the ranks had not finished after {self.timeout:g} s. A rank may still be "
                f"waiting in a collective that another rank never called. {SAME_CALLS}"
            )
        except Exception as error:  # noqa: BLE001 - whatever the reader's code raises is the answer
            return f"hint: {_explain(error, printed.getvalue())}"
        return RIGHT if hint is None else f"hint: {hint}"

    def _run(self, observe: Callable[..., Any], function: Any, nproc: int) -> list[Any]:
        if nproc == 0:
            return [_observed(observe, function)]
        limit = timedelta(seconds=self.timeout)
        return run_ranks(_observed, observe, function, nproc=nproc, timeout=limit)

    def _judged(self, seen: list[Any]) -> str | None:
        try:
            return self.judge(seen)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            return f"your function returned the wrong kind of result: {_first_line(error)}"


def _observed(observe: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Observe the reader's function or class. The NotImplemented of a stub is no result."""

    def attempt(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is NotImplemented:
            raise NotYetWritten
        return result

    return observe(function if isinstance(function, type) else attempt)


def _judge_training(ranks: list[list[float]]) -> str | None:
    first, *later = map(max, zip(*ranks, strict=True))
    if first > 1e-4:
        return (
            "right so far, but a training step on two ranks leads to other weights than PyTorch's"
        )
    if first:
        return (
            "right up to rounding, but a training step on two ranks does not lead to PyTorch's "
            "weights, bit for bit. Does it compute in another order?"
        )
    if any(later):
        return (
            "the first training step equals PyTorch's, but a later one does not. What has to live "
            "on from step to step, and what must begin from scratch?"
        )
    return None


def _explain(error: Exception, printed: str) -> str:
    """Return what an exception on a rank says about the reader's function.

    If the ranks' collectives do not match, gloo answers with a path into its C++ sources. What
    happened helps the reader more: a rank went on alone, or two ranks brought different sizes.
    """
    text = _first_line(error)
    # gloo aborts a process that gets more than it expects, so only its output names the reason. A
    # peer may notice the closed connection first.
    if "preamble.length" in text + printed:
        return MISMATCH
    if isinstance(error, RuntimeError) and "gloo/" in text and has_no_partner(error):
        return ALONE
    return f"your function raised {type(error).__name__}: {text}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]
