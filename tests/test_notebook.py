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
---
class Wrong(Exception):
    pass

def work(fails):
    rank = initialize_ddp().rank
    print("in rank", rank)
    if fails:
        raise Wrong(rank)
    return torch.tensor(rank)
---
run_ranks(work, False)
---
try:
    run_ranks(work, True)
except Wrong as error:
    print("caught", type(error))
---
warnings.simplefilter("ignore")
with ParallelExecutor(2) as executor:
    print(executor.run(lambda device, data: data * 2, torch.tensor([1, 2])))
---
import numpy as np
from ddp_ref import parallelize_on_gpus

@parallelize_on_gpus(num_gpus=2)
def multiply(device, data):
    return (torch.from_numpy(data).to(device) @ torch.ones(2, 2)).numpy()

print([result.tolist() for result in multiply(np.eye(2, dtype=np.float32))])
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
[tensor(0), tensor(1)][rank 0] in rank 0
[rank 1] in rank 1
caught <class '__main__.Wrong'>
[tensor([2, 4]), tensor([2, 4])]
[[[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]]
interrupted
"""


def test_a_kernel_shows_results_output_and_its_own_exceptions(tmp_path):
    pytest.importorskip("ipykernel")
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "cells").write_text(CELLS)
    result = run(sys.executable, "kernel.py", cwd=tmp_path)
    assert result.stdout == SHOWN, result.stderr
    assert result.code == 0, result.stderr
