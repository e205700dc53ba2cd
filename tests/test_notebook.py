"""In a notebook's kernel, cells can start processes that run functions defined in the cells."""

import sys

import pytest
from harness import run

KERNEL = """
import sys
from pathlib import Path
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3")
try:
    for cell in Path("cells").read_text().split("---"):
        reply = client.execute_interactive(cell, timeout=100)
        assert reply["content"]["status"] == "ok", reply
finally:
    client.stop_channels()
    manager.shutdown_kernel()
"""

CELLS = """
import os, signal, threading, time, warnings
import torch
from ddp_ref import ParallelExecutor, initialize_ddp, run_ranks

class Wrong(Exception):
    pass

def work():
    rank = initialize_ddp().rank
    print("in rank", rank)
    raise Wrong(rank)
---
try:
    run_ranks(work)
except Wrong as error:
    print("caught", type(error))
---
warnings.simplefilter("ignore")
with ParallelExecutor(2) as executor:
    print(executor.run(lambda device, data: data * 2, torch.tensor([1, 2])))
---
threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    run_ranks(lambda: time.sleep(1000))
except KeyboardInterrupt:
    print("interrupted")
"""

SHOWN = """\
[rank 0] in rank 0
[rank 1] in rank 1
caught <class '__main__.Wrong'>
[tensor([2, 4]), tensor([2, 4])]
interrupted
"""


def test_a_kernel_shows_results_output_and_its_own_exceptions(tmp_path):
    pytest.importorskip("ipykernel")
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "cells").write_text(CELLS)
    result = run(sys.executable, "kernel.py", cwd=tmp_path)
    assert result.stdout == SHOWN, result.stderr
    assert result.code == 0, result.stderr
