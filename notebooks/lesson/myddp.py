"""The reader's file, `myddp.py`: data-parallel training in six stages, each a function or two.

`notebooks/myddp.py` holds what a reader has written so far. The next stages use it, and the
chapters' solutions for what is missing, so nobody has to finish a stage to read on.
"""

import ast
import inspect
import linecache
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CHAPTERS = Path(__file__).resolve().parents[1]
KEPT = CHAPTERS / "myddp.py"
STAGES = {
    1: ("reduce_scatter", "all_gather"),
    2: ("start_alike", "average_gradients", "shard_indices"),
    3: ("token_step",),
    4: ("Buckets",),
    5: ("ShardedAdam",),
    6: ("Gather", "ShardedBlock"),
}
HEAD = '''\
"""Data-parallel training, written by hand in the chapters 02, 05, 07 and 10."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
'''
RING = '''\
class Ring:
    """The ranks in a circle: each sends to the next rank, and receives from the one before."""

    def __init__(self):
        self.rank, self.world_size, self.sending = dist.get_rank(), dist.get_world_size(), []

    def send(self, tensor):
        """Send a copy to the next rank, and do not wait."""
        copy = tensor.detach().clone()
        self.sending.append(dist.isend(copy, (self.rank + 1) % self.world_size))

    def receive(self, like):
        """Wait for the previous rank's tensor, which has the shape of `like`, and return it."""
        received = torch.empty_like(like)
        dist.recv(received, (self.rank - 1) % self.world_size)
        while self.sending:
            self.sending.pop().wait()
        return received
'''
SOLUTION = re.compile(
    r"<details>\n<summary>Solution</summary>\n\n```python\n(.*?)```\n.*?</details>", re.DOTALL
)


def stage_of(name: str) -> int | None:
    """Return the stage that a function belongs to."""
    return next((stage for stage, names in STAGES.items() if name in names), None)


def definitions(code: str) -> dict[str, str]:
    """Return the functions and classes of a source text by name, with their decorators."""
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *[each.lineno for each in node.decorator_list]])
            found[node.name] = "\n".join(code.splitlines()[first - 1 : node.end_lineno])
    return found


def imports(code: str) -> list[str]:
    """Return the import statements of a source text that the reader's file can use."""
    nodes = [node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
    own = ("exercises", "myddp", "lesson")  # of the notebook
    return [ast.unparse(node) for node in nodes if getattr(node, "module", "") not in own]


def solutions() -> dict[str, str]:
    """Return the stages' solutions in the chapters by the name of their function or class."""
    found: dict[str, str] = {}
    for chapter in sorted(CHAPTERS.glob("[0-9][0-9]_*.md")):
        for code in SOLUTION.findall(chapter.read_text()):
            found |= definitions(code)
    return {name: code for name, code in found.items() if stage_of(name)}


def keep(function: Callable[..., Any]) -> None:
    """Write one of the reader's functions, which is right, into `myddp.py`."""
    cell, kept = _cell_of(function), _kept()
    own = {  # with helpers of the same cell
        name: code
        for name, code in definitions(cell).items()
        if name == function.__name__ or stage_of(name) is None
    }
    KEPT.write_text(_file(definitions(kept) | own, imports(kept) + imports(cell)))
    Path("myddp.py").write_text(source())  # for the cells of this notebook


def source() -> str:
    """Return the reader's file, with solutions for what is missing."""
    kept = _kept()
    return _file(solutions() | definitions(kept), imports(kept))


def load(**functions: Any) -> SimpleNamespace:
    """Return what the reader's file defines, with `functions` in place of its own."""
    names: dict[str, Any] = {"__name__": "myddp"}
    exec(compile(source(), "myddp.py", "exec"), names)
    names |= functions
    return SimpleNamespace(**names)


def _kept() -> str:
    return KEPT.read_text() if KEPT.exists() else ""


def _file(known: dict[str, str], imported: list[str]) -> str:
    head = HEAD.splitlines()
    head += [line for line in dict.fromkeys(imported) if line not in head]
    order = [name for stage in STAGES.values() for name in stage]
    helpers = [name for name in known if name not in order and name != "Ring"]
    parts = [RING.rstrip(), *[known[name] for name in helpers + order if name in known]]
    return "\n\n\n".join(["\n".join(head), *parts]) + "\n"


def _cell_of(function: Callable[..., Any]) -> str:
    """Return the source of the cell that defines a function or class."""
    parts = map(inspect.unwrap, [function, *vars(function).values()])  # without decorators
    code = next(each.__code__ for each in parts if hasattr(each, "__code__"))
    return "".join(linecache.getlines(code.co_filename))
