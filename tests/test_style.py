"""The package uses the field's words as names, and documents the arguments of what it exports."""

import inspect
import io
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import public_names

import ddp_ref

PACKAGE = Path(ddp_ref.__file__).parent

# A private word, and what to call it instead.
INSTEAD = {
    "Exchange": "RankSync",
    "tell": "start",
    "hear": "finish",
    "_meet": "_sync",
    "_hear": "_apply",
    "Total": "GlobalSummary",
    "Requests": "LocalFlags",
    "raise_untold": "raise_unreported",
    "final": "last, or fatal_errors",
    "Objective": "LossAndMetrics",
    "bare": "unwrap_model",
    "replicate": "wrap_model",
    "reducing": "gradient_sync",
    "position": "samples_seen",
    "set_place": "seek",
    "data_of": "data_fingerprint",
    "has_known_order": "order_is_reproducible",
    "Generators": "RngState",
    "hold": "capture",
    "rehearse": "warm_up_ddp_buckets",
    "settle": "Call",
    "outcomes": "_outcomes for the module, or what is in it",
    "Talk": "Request",
    "held": "open_fds",
    "life": "parent_alive",
    "found": "the noun: metrics, losses, path",
    "exchange_every": "sync_every",
}


def complaints(text: str, file: str) -> list[str]:
    """Return a line for each private word that the module `text` or its file has as a name.

    An attribute counts if it is one of `self`: `file.tell()` is not our name.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    names = [(1, Path(file).stem)]
    for owner, dot, token in zip([None, None, *tokens], [None, *tokens], tokens, strict=False):
        if not (dot and dot.string == ".") or (owner and owner.string == "self"):
            names.append((token.start[0], token.string))
    return [
        f"{file}:{line}: {name}: call it {INSTEAD[name]}" for line, name in names if name in INSTEAD
    ]


def test_names_are_the_fields_words() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    lines = []
    for file in files:
        lines += complaints(file.read_text(encoding="utf-8"), str(file.relative_to(PACKAGE)))
    assert lines == [], "\n" + "\n".join(lines)


def test_a_private_word_is_found_as_a_name_only() -> None:
    for text in ("found = 1", "self.found = 1", "f(found=1)", "def found(): pass", "import found"):
        assert complaints(text, "a.py") == [
            "a.py:1: found: call it the noun: metrics, losses, path"
        ]
    (line,) = complaints("", "training/position.py")
    assert line == "training/position.py:1: position: call it samples_seen"
    assert complaints("file.tell()  # found\nprint(x.position, 'position')\n", "a.py") == []


def exported_functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield the name, the object and the docstring of each function, class and method exported."""
    for name in sorted(public_names()):
        exported = getattr(ddp_ref, name)
        if not inspect.isclass(exported):
            yield name, exported, exported.__doc__ or ""
            continue
        yield name, exported, f"{exported.__doc__}{exported.__init__.__doc__}"
        for method, function in inspect.getmembers(exported, inspect.isfunction):
            if not method.startswith("_"):
                yield f"{name}.{method}", function, function.__doc__ or ""


def test_the_reference_lists_all_arguments() -> None:
    missing = []
    for name, function, text in exported_functions():
        arguments = text.partition("Args:")[2] or text.partition("Attributes:")[2]
        for parameter in inspect.signature(function).parameters:
            if parameter != "self" and f" {parameter}:" not in arguments.replace("*", ""):
                missing.append(f"{name}: {parameter}")
    assert missing == []
