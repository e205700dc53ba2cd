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
GIVEN = '''\
"""Data-parallel training, written by hand in the chapters 02, 05, 07 and 10."""

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


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


def solutions() -> dict[str, str]:
    """Return the solutions of all chapters by the name of their function or class."""
    found: dict[str, str] = {}
    for chapter in sorted(CHAPTERS.glob("[0-9][0-9]_*.md")):
        for code in SOLUTION.findall(chapter.read_text()):
            found |= definitions(code)
    return found


def keep(function: Callable[..., Any]) -> None:
    """Write one of the reader's functions, which is right, into `myddp.py`."""
    own = _kept() | {function.__name__: definitions(_cell_of(function))[function.__name__]}
    KEPT.write_text(_file(own))
    Path("myddp.py").write_text(source())  # for the cells of this notebook


def source() -> str:
    """Return the reader's file, with solutions for what is missing."""
    return _file(solutions() | _kept())


def load(**functions: Any) -> SimpleNamespace:
    """Return what the reader's file defines, with `functions` in place of its own."""
    names: dict[str, Any] = {"__name__": "myddp"}
    exec(compile(source(), "myddp.py", "exec"), names)
    names |= functions
    return SimpleNamespace(**names)


def _kept() -> dict[str, str]:
    return definitions(KEPT.read_text()) if KEPT.exists() else {}


def _file(known: dict[str, str]) -> str:
    order = [name for stage in STAGES.values() for name in stage if name in known]
    return "\n\n\n".join([GIVEN.rstrip(), *[known[name] for name in order]]) + "\n"


def _cell_of(function: Callable[..., Any]) -> str:
    """Return the source of the cell that defines a function or class."""
    parts = map(inspect.unwrap, [function, *vars(function).values()])  # without decorators
    code = next(each.__code__ for each in parts if hasattr(each, "__code__"))
    return "".join(linecache.getlines(code.co_filename))
