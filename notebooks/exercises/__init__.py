"""The exercises of the notebooks, a module a chapter, each with its EXERCISES by name."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from lesson import Exercise


def check(function: Callable[..., Any]) -> str:
    """Check the reader's answer to the exercise of its name, print the line and return it."""
    exercises = all_exercises()
    if function.__name__ not in exercises:
        raise ValueError(f"no exercise is called {function.__name__!r}: keep the name of the stub")
    return exercises[function.__name__].check(function)


def all_exercises() -> dict[str, Exercise]:
    """Return the exercises of all chapters by name."""
    found: dict[str, Exercise] = {}
    for module in iter_modules(__path__):
        if module.name.startswith("chapter_"):
            found |= import_module(f"{__name__}.{module.name}").EXERCISES  # a test compares names
    return found
