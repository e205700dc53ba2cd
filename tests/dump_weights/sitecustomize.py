"""Put this folder on PYTHONPATH: each rank then writes its DDP model's weights before it leaves."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

models: list[DistributedDataParallel] = []
init, destroy = DistributedDataParallel.__init__, dist.destroy_process_group


def remember(self, *args, **kwargs):
    init(self, *args, **kwargs)
    models.append(self)


def dump_and_destroy(*args, **kwargs):
    for model in models:
        torch.save(model.module.state_dict(), f"weights_of_rank_{dist.get_rank()}.pt")
    destroy(*args, **kwargs)


DistributedDataParallel.__init__ = remember
dist.destroy_process_group = dump_and_destroy
