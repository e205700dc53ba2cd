"""A complete DDP training in one file, which needs only torch. Copy it and put your own job in.

python minimal_ddp.py
torchrun --standalone --nproc-per-node=2 minimal_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    """Join the process group that torchrun describes and return this process's device."""
    if "RANK" not in os.environ:  # started with plain python: a group of one
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):  # one GPU per process
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def make_data():
    """Return points in 20 dimensions and on which side of a curved surface each one lies."""
    generator = torch.Generator().manual_seed(0)  # the same data in every process
    inputs = torch.randn(4096, 20, generator=generator)
    return TensorDataset(inputs, (inputs.square().sum(1) > 20).long())


def main(epochs=5):
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = make_data()
    sampler: DistributedSampler = DistributedSampler(data)  # each process gets its own part
    loader = DataLoader(data, batch_size=64 // world_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        ddp_model.train()
        total = torch.zeros((), device=device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = ddp_model(inputs.to(device))
            loss = nn.functional.cross_entropy(outputs, targets.to(device))
            loss.backward()  # DDP averages the gradients over all processes here
            optimizer.step()
            total += loss.detach() * len(targets)
        dist.all_reduce(total)  # the sum over all processes
        if rank == 0:
            print(f"epoch {epoch} | loss {total.item() / len(sampler) / world_size:.4f}")
    if rank == 0:  # one process saves; tensors on the CPU can be loaded on any machine
        torch.save({n: t.cpu() for n, t in model.state_dict().items()}, "minimal.pt")

    # Proof that the processes have trained one model: all ended with the same weights.
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    of_all = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(of_all, weights)
    assert all(torch.equal(weights, other) for other in of_all)
    if rank == 0:
        print(f"all {world_size} processes on {device.type} hold the same weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
