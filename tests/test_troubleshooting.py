"""Every message that a heading of troubleshooting.md quotes is real.

This file looks for it at its source: in the installed torch, or in our own code.
"""

import ast
import mmap
import re
from pathlib import Path

import torch
from harness import ROOT

import ddp_ref

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FENCES = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADINGS = re.findall(r"^##+ (.+)$", FENCES.sub("", PAGE), re.MULTILINE)
QUOTED = {text for heading in HEADINGS for text in re.findall(r"`([^`]+)`", heading)}
# The first is Python's error for a variable that is not set, the second one of Python's files, the
# third argparse's. The others are Linux's, and our own name.
OF_OTHERS = {"KeyError: 'LOCAL_RANK'", "popen_fork.py", "ambiguous option", "ptrace_scope"}
OF_OTHERS |= {"Bus error", "SIGABRT", "SIGSEGV", "Too many open files", "ddp_ref"}
# Only CUDA builds have these. We found all by hand in torch 2.13.0 for CUDA 13, nvidia-nccl-cu13
# 2.29.7 and nvidia-cuda-runtime 13.0.96, and the last one in torch 2.14.1, which has nccl2.
IN_CUDA_BUILDS = {
    "Tensors must be CUDA and dense",
    "CUDA out of memory",
    "Duplicate GPU detected",
    "invalid device ordinal",
    "device-side assert",
    "unhandled system error",
    "unhandled cuda error",
    "Watchdog caught collective operation timeout",
    "WorkNCCL",
    "Operation timed out after",
}
# The constant part of a heading that shows an example.
CONSTANT = {
    "2 GPUs for 4 ranks: start one rank per GPU": "start one rank per GPU",
    "unrecognized arguments: --local-rank": "--local-rank",
    "Signal 9 (SIGKILL) received by PID": "received by PID",
    "got signal: 1": "got signal: ",
}
TORCH_FILES = [
    "distributed/elastic/multiprocessing/*.py",
    "distributed/elastic/multiprocessing/errors/__init__.py",
    "distributed/elastic/utils/distributed.py",
    "distributed/launch.py",
    "nn/functional.py",
    "nn/modules/module.py",
    "nn/parallel/distributed.py",
    "optim/*.py",
    "utils/data/_utils/collate.py",
    "lib/libtorch_cpu.so",
]


def in_file(path: Path, text: str) -> bool:
    """Return whether the file `path`, which may have hundreds of MB, contains `text`."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text.encode()) >= 0


def test_every_message_that_a_heading_quotes_is_real():
    """One of ours is in a string, or in a part of an f-string between two values."""
    files = Path(ddp_ref.__file__).parent.rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    of_ours = PAGE.partition("## Errors of `ddp_ref`")[2].partition("\n## ")[0]
    torch_files = [path for name in TORCH_FILES for path in Path(torch.__file__).parent.glob(name)]
    missing = []
    for quoted in QUOTED - OF_OTHERS - IN_CUDA_BUILDS:
        message = CONSTANT.get(quoted, quoted)
        if any(message in text for text in texts):
            continue
        is_ours = f"### `{quoted}`" in of_ours  # torch may have the same few words
        if is_ours or not any(in_file(file, message) for file in torch_files):
            missing.append(quoted)
    assert len(QUOTED) > 60 and missing == []
