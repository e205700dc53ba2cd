"""Put this folder on PYTHONPATH: each rank then writes its DDP model's weights before it leaves.

A rank ends with exit code 70 where threads of the process group outlive the group. They would need
the interpreter lock to let go of a tensor: while Python ends that aborts the process, and while a
model that still holds the group is freed it never comes.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

bare_models: list[torch.nn.Module] = []
init, destroy = DistributedDataParallel.__init__, dist.destroy_process_group


def remember(self, module, *args, **kwargs):
    init(self, module, *args, **kwargs)
    bare_models.append(module)


def dump_and_destroy(*args, **kwargs):
    for model in bare_models:
        torch.save(model.state_dict(), f"weights_of_rank_{dist.get_rank()}.pt")
    destroy(*args, **kwargs)
    tasks = Path("/proc/self/task")  # Linux only
    names = [(task / "comm").read_text().strip() for task in tasks.glob("*")]
    if left := [name for name in names if "gloo" in name]:
        print("threads of the process group are left:", left, file=sys.stderr, flush=True)
        os._exit(70)


DistributedDataParallel.__init__ = remember
dist.destroy_process_group = dump_and_destroy
