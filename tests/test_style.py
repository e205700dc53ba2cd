"""The package uses the field's words as names, and documents the arguments of what it exports."""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
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
LOCALLY = {"outcomes"}  # a good name for a function's own dict of Outcome objects


class Names(ast.NodeVisitor):
    """Collect the names that a module defines or passes as keywords, with their lines.

    What a module only uses is not collected: `file.tell()` is not our name.
    """

    def __init__(self) -> None:
        self.names: list[tuple[int, str]] = []
        self._in_function = False

    def visit(self, node: ast.AST) -> None:
        for name in _defined(node):
            own_variable = self._in_function and isinstance(node, ast.Name)
            if not (own_variable and name in LOCALLY):
                self.names.append((getattr(node, "lineno", 1), name))
        outer, function = self._in_function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        if isinstance(node, function | ast.ClassDef):
            self._in_function = isinstance(node, function)
        self.generic_visit(node)
        self._in_function = outer


def _defined(node: ast.AST) -> list[str]:
    """Return the names that a node of the syntax tree defines, or passes as a keyword."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.arg() | ast.keyword():
            return [node.arg] if node.arg else []
        case ast.Name(ctx=ast.Store() | ast.Del()):
            return [node.id]
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            return [node.attr]
        case ast.alias():
            return [(node.asname or node.name).split(".")[-1]]
        case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar() if node.name:
            return [node.name]
        case ast.MatchMapping() if node.rest:
            return [node.rest]
        case ast.MatchClass():
            return list(node.kwd_attrs)
        case ast.Global() | ast.Nonlocal():
            return list(node.names)
    return []


def complaints(text: str, file: str) -> list[str]:
    """Return a line for each private word in the module `text`, and in the name of its file."""
    collected = Names()
    collected.visit(ast.parse(text))
    names = [(1, Path(file).stem), *collected.names]
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


@pytest.mark.parametrize(
    "text",
    [
        "def found(): pass",
        "async def found(): pass",
        "class found: pass",
        "def f(found): pass",
        "def f(*found): pass",
        "def f(*, found=1): pass",
        "lambda found: 1",
        "found = 1",
        "found: int",
        "found += 1",
        "def f():\n  a, (*found, b) = c",
        "[1 for found in x]",
        "(found := 1)",
        "self.found = 1",
        "self.found: int = 1",
        "f(found=1)",
        "with f() as found: pass",
        "try: pass\nexcept OSError as found: pass",
        "import a as found",
        "from a import found",
        "from . import found",
        "match x:\n  case [*found]: pass",
        "match x:\n  case {**found}: pass",
        "match x:\n  case A(found=1): pass",
        "match x:\n  case found: pass",
        "def f():\n  global found",
        "outcomes = {}",
        "class A:\n  outcomes: dict",
        "def f(outcomes): pass",
        "self.outcomes = {}",
        "import outcomes",
    ],
)
def test_a_private_word_is_found_however_it_is_defined(text: str) -> None:
    assert complaints(text, "a.py")


def test_a_private_word_is_found_as_the_name_of_a_file() -> None:
    (line,) = complaints("", "training/position.py")
    assert line == "training/position.py:1: position: call it samples_seen"


def test_names_that_are_only_used_and_a_functions_own_outcomes_are_allowed() -> None:
    text = 'file.tell()\nprint(found, x.position)\ndef f():\n  outcomes = {}\n  """position"""\n'
    assert complaints(text, "a.py") == []


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
