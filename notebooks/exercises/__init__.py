"""The exercises of the notebooks: a module for each chapter, and for each stage of myddp.py."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from lesson import Exercise, myddp, score
from lesson.exercise import RIGHT


def check(*functions: Callable[..., Any]) -> str:
    """Check the reader's answers to the exercises of their names, up to the first one not right.

    It prints a line for each, and returns the last one. A right answer that belongs to myddp.py is
    kept there; when a stage is complete, its training is measured.
    """
    exercises, answer = all_exercises(), ""
    for function in functions:
        name = function.__name__
        if name not in exercises:
            raise ValueError(f"no exercise is called {name!r}: keep the name of the stub")
        if len(functions) > 1:
            print(f"{name}: ", end="")
        answer = exercises[name].check(function)
        if answer != RIGHT:
            break
        if stage := myddp.stage_of(name):
            myddp.keep(function)
            if name == myddp.STAGES[stage][-1]:
                score.show(stage)
    return answer


def all_exercises() -> dict[str, Exercise]:
    """Return the exercises of all chapters and stages by name."""
    found: dict[str, Exercise] = {}
    for module in iter_modules(__path__):
        if module.name.startswith(("chapter_", "stage_")):
            found |= import_module(f"{__name__}.{module.name}").EXERCISES  # a test compares names
    return found
