"""A prediction before a run, and what was measured."""


def reveal(guess: object, measured: object) -> None:
    """Print what was measured, beside the reader's guess (None: none yet)."""
    said = "you made no guess" if guess is None else f"your guess: {guess}"
    print(f"measured: {measured} | {said}")
