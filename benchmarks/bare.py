"""The least that a job does: torchrun --standalone --nproc-per-node=2 benchmarks/bare.py"""

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
