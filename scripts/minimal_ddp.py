"""Train a model with DDP, in one file that needs only PyTorch. Replace data and model with yours.

python minimal_ddp.py
torchrun --standalone --nproc-per-node=2 minimal_ddp.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    """Join the process group that torchrun describes and return this process's device."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    defaults |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:  # plain python sets none of these: a group of one
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            sys.exit("srun does not set RANK: start with torchrun, or each task trains alone")
        os.environ.update(defaults)
    if missing := [name for name in defaults if name not in os.environ]:
        sys.exit(f"RANK is set, but not {', '.join(missing)}: start with torchrun, which sets all")
    gpus, processes = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus == 0:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    if gpus < processes:
        sys.exit(
            f"{gpus} GPUs for {processes} processes: start one process per GPU, or "
            "set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def make_data():
    """Return random points, and whether each one lies outside a sphere."""
    generator = torch.Generator().manual_seed(0)  # the same data in every process
    inputs = torch.randn(4096, 20, generator=generator)
    return TensorDataset(inputs, (inputs.square().sum(1) > 20).long())


def main(epochs=5):
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"training in {world_size} processes on {device.type}")
    data = make_data()
    sampler: DistributedSampler = DistributedSampler(data)  # each process gets its own shard
    # batch_size is per process; num_workers=4 and, for GPUs, pin_memory=True go here too
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # otherwise every epoch uses the same order
        ddp_model.train()
        total = torch.zeros((), device=device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = ddp_model(inputs.to(device))
            loss = nn.functional.cross_entropy(outputs, targets.to(device))
            loss.backward()  # DDP averages the gradients over all processes here
            optimizer.step()
            total += loss.detach() * len(targets)
        dist.all_reduce(total)  # until here, it is the sum over this process's shard
        if rank == 0:
            print(f"epoch {epoch} | loss {total.item() / len(sampler) / world_size:.4f}")

    # Check that DDP kept the processes in sync: all must hold the weights of rank 0.
    same = torch.ones((), device=device)
    for weight in model.parameters():
        weight_of_0 = weight.detach().clone()
        dist.broadcast(weight_of_0, src=0)
        same *= torch.equal(weight_of_0, weight)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    assert same.item() == 1, "the processes hold different weights"
    if rank == 0:
        print(f"all {world_size} processes on {device.type} hold the same weights")
        torch.save(model.cpu().state_dict(), "minimal.pt")  # the file loads without a GPU, too
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
