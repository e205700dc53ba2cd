"""Carry an exception to another process: its type, the place it was raised, its traceback."""

import pickle
import traceback
from contextlib import suppress

import cloudpickle


class RemoteTraceback(Exception):
    """The traceback of another process: the cause it is shown as on Python 3.10, without notes."""


def pack_exception(error: BaseException, by_value: bool = True) -> bytes:
    """Return `error` and its traceback as bytes, whatever the exception holds.

    A class that cannot be imported, as one of a function's own, travels as a copy `by_value`.
    """
    described = "".join(traceback.format_exception_only(type(error), error)).strip()
    return pickle.dumps((_pickled(error, by_value), described, describe(error)))


def unpack_exception(packed: bytes, where: str) -> BaseException:
    """Return the exception that `pack_exception` packed, with `where` and its traceback as a note.

    It has its original type if that survives pickling, else it is a RuntimeError with the type's
    name and the text. `where` names the process: "rank 1", "cuda:0".
    """
    pickled, described, trace = pickle.loads(packed)
    try:
        error = pickle.loads(pickled) if pickled else RuntimeError(described)
    except Exception:  # noqa: BLE001 - the user's classes are loaded here: anything may come
        error = RuntimeError(described)
    add_note(error, f"raised on {where}:\n{trace}")
    return error


def describe(error: BaseException) -> str:
    """Return `error` as Python prints it: its traceback, its text, its notes."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def add_note(error: BaseException, note: str) -> None:
    """Add `note` to `error`: its `add_note`, or on Python 3.10 the same list shown as a cause."""
    with suppress(Exception):  # an exception may refuse new attributes: then without the note
        if hasattr(error, "add_note"):
            error.add_note(note)
            return
        error.__dict__.setdefault("__notes__", []).append(note)
        cause = RemoteTraceback("\n".join(error.__dict__["__notes__"]))
        old = error.__cause__
        cause.__cause__ = old.__cause__ if isinstance(old, RemoteTraceback) else old
        error.__cause__ = cause


def _pickled(error: BaseException, by_value: bool) -> bytes | None:
    """Return `error` pickled, or None if it would not come back as the type that it is."""
    # By reference first: a class of the script itself is then the receiver's own, not a copy.
    for dumps in (pickle.dumps, cloudpickle.dumps)[: 1 + by_value]:
        try:
            pickled = dumps(error)
            if type(pickle.loads(pickled)) is type(error):
                return pickled
        except Exception:  # noqa: BLE001 - __reduce__ and __init__ are the user's: anything may come
            continue
    return None
