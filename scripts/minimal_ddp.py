"""Train a model with DDP, in one file that needs only PyTorch. Replace data and model with yours.

python minimal_ddp.py
torchrun --standalone --nproc-per-node=2 minimal_ddp.py
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not later: while a group is open, this would keep it alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    """Join the process group that torchrun describes and return this process's device."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    if "RANK" not in os.environ:  # plain python sets none of these: a group of one
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            sys.exit("srun does not set RANK: start with torchrun, or each task trains alone")
        os.environ.update(zip(names, ["0", "1", "0", "1", "localhost", "0"], strict=True))
    if missing := [name for name in names if name not in os.environ]:
        sys.exit(f"RANK is set, but not {', '.join(missing)}: start with torchrun, which sets all")
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU each, or the CPU
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def train(device, epochs=5):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"training in {world_size} processes on {device.type}")
    points = torch.randn(4096, 20, generator=torch.Generator().manual_seed(0))  # same everywhere
    data = TensorDataset(points, (points.square().sum(1) > 20).long())  # outside of a sphere?
    sampler: DistributedSampler = DistributedSampler(data)  # each process gets its own shard
    loader = DataLoader(data, batch_size=32, sampler=sampler)  # batch_size is per process
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # otherwise every epoch uses the same order
        ddp_model.train()
        total = torch.zeros((), device=device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp_model(inputs.to(device)), targets.to(device))
            loss.backward()  # DDP averages the gradients over all processes here
            optimizer.step()
            total += loss.detach() * len(targets)
        dist.all_reduce(total)  # until here, it is the sum over this process's shard
        if rank == 0:
            print(f"epoch {epoch} | loss {total.item() / len(sampler) / world_size:.4f}")

    same = torch.ones((), device=device)  # 1: this process holds the weights of process 0
    for weight in model.parameters():
        weight_of_0 = weight.detach().clone()
        dist.broadcast(weight_of_0, src=0)
        same *= torch.equal(weight_of_0, weight)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    assert same.item() == 1, "the processes hold different weights"
    if rank == 0:
        print(f"all {world_size} processes on {device.type} hold the same weights")
        torch.save(model.cpu().state_dict(), "minimal.pt")  # the file loads without a GPU, too


if __name__ == "__main__":
    train(setup())
    dist.destroy_process_group()  # after train: the exit may hang while a DDP model still exists
