"""A typical mistake in a notebook's exercise gets the hint that is meant for it."""

from importlib import import_module

import pytest
from exercises import all_exercises, check

pytestmark = pytest.mark.exercises
CHAPTERS = [f"mistakes.chapter_{number:02}" for number in range(11)]
MISTAKES = {
    name: mistakes
    for chapter in CHAPTERS
    for name, mistakes in import_module(chapter).MISTAKES.items()
}


def test_no_two_exercises_have_one_name():
    found = [import_module(f"exercises.chapter_{number:02}").EXERCISES for number in range(11)]
    assert sum(len(exercises) for exercises in found) == len(all_exercises())


def test_every_exercise_has_two_mistakes_with_hints_of_their_own():
    assert MISTAKES.keys() == all_exercises().keys()
    for name, mistakes in MISTAKES.items():
        hints = [hint for _, hint in mistakes]
        assert len(hints) >= 2 and len(set(hints)) == len(hints), name


@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name in MISTAKES for n in range(len(MISTAKES[name]))]
)
def test_a_mistake_gets_its_hint(name, number, capsys):
    """That a stub gets 'not yet' and the solution 'right' is seen as the notebooks run."""
    wrong, hint = MISTAKES[name][number]
    wrong.__name__ = name
    answer = check(wrong)
    assert answer.startswith("hint: ") and hint in answer
    others = [other for _, other in MISTAKES[name] if other != hint]
    assert not any(other in answer for other in others)
    assert capsys.readouterr().out == f"{answer}\n"
