"""The package uses the field's words as names, and documents the arguments of what it exports."""

import inspect
import io
import tokenize
from pathlib import Path

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


def names_in(file):
    """Yield the line and the text of each name in a module, and the module's own.

    An attribute counts if it is one of `self`: `file.tell()` is not our name.
    """
    yield 1, file.stem
    tokens = list(tokenize.generate_tokens(io.StringIO(file.read_text()).readline))
    for owner, dot, token in zip([None, None, *tokens], [None, *tokens], tokens, strict=False):
        if not (dot and dot.string == ".") or (owner and owner.string == "self"):
            yield token.start[0], token.string


def test_names_are_the_fields_words():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    named = [(file, *name) for file in files for name in names_in(file)]
    wrong = [f"{f}:{n}: {name}: call it {INSTEAD[name]}" for f, n, name in named if name in INSTEAD]
    assert wrong == [], "\n" + "\n".join(wrong)


def exported_functions():
    """Yield the name, the object and the docstring of each function, class and method exported."""
    for name in public_names():
        exported = getattr(ddp_ref, name)
        if not inspect.isclass(exported):
            yield name, exported, exported.__doc__ or ""
            continue
        yield name, exported, f"{exported.__doc__}{exported.__init__.__doc__}"
        for method, function in inspect.getmembers(exported, inspect.isfunction):
            if not method.startswith("_"):
                yield f"{name}.{method}", function, function.__doc__ or ""


def test_the_reference_lists_all_arguments():
    missing = []
    for name, function, text in exported_functions():
        arguments = text.partition("Args:")[2] or text.partition("Attributes:")[2]
        for parameter in inspect.signature(function).parameters:
            if parameter != "self" and f" {parameter}:" not in arguments.replace("*", ""):
                missing.append(f"{name}: {parameter}")
    assert missing == []
