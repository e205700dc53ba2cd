"""Train in several processes:  python scripts/multigpu_spawn.py [total_epochs] [save_every]"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import datautils


def ddp_setup(rank, world_size):
    """Join the process group; return this process's device."""
    os.environ.setdefault("MASTER_ADDR", "localhost")  # where the processes meet
    os.environ.setdefault("MASTER_PORT", "12355")  # unless the caller has chosen one, as below
    if torch.cuda.device_count() < world_size:  # a GPU for each process, or the CPU
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=device)
    return device


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every, test_data):
        self.device = device
        self.model = DDP(model.to(device))
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.test_data = test_data

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()  # here, DDP averages the gradients over all processes
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        self.model.train()
        totals = torch.zeros(2, device=self.device)  # sum of the losses, number of samples
        for source, targets in self.train_data:  # (batch, 64), (batch,)
            loss = self._run_batch(source.to(self.device), targets.to(self.device))
            totals[0] += loss * len(targets)  # a mean over the batch, turned back into a sum
            totals[1] += len(targets)
        right = datautils.count_right(self.model.module, self.test_data, self.device)
        dist.all_reduce(totals)  # sums over all processes
        dist.all_reduce(right)
        loss, accuracy = totals[0] / totals[1], right[0] / right[1]
        if dist.get_rank() == 0:
            print(f"epoch {epoch} | loss {loss:.4f} | test accuracy {accuracy:.4f}")

    def _save_checkpoint(self, epoch):
        datautils.save("checkpoint.pt", self.model.module.state_dict(), epoch)

    def train(self, max_epochs):
        for epoch in range(1, max_epochs + 1):
            self._run_epoch(epoch)
            if dist.get_rank() == 0 and (epoch % self.save_every == 0 or epoch == max_epochs):
                self._save_checkpoint(epoch)


def load_train_objs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return datautils.MyTrainDataset(), model, optimizer


def prepare_dataloader(dataset, batch_size):
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))


def main(rank, world_size, save_every, total_epochs, batch_size):
    device = ddp_setup(rank, world_size)
    train_set, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(train_set, batch_size)
    test_set = datautils.MyTrainDataset(train=False)  # each process tests its own part of it
    test_data = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size)
    if rank == 0:
        print(datautils.describe(device, world_size, len(train_data)))
    Trainer(model, train_data, optimizer, device, save_every, test_data).train(total_epochs)
    dist.destroy_process_group()  # may hang while a DDP model exists, so no variable keeps it


if __name__ == "__main__":
    args = datautils.parse_args(__doc__, nproc=True)
    os.environ["MASTER_PORT"] = str(20_000 + os.getpid() % 10_000)  # two jobs rarely collide
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or each would use all cores
    mp.spawn(main, (args.nproc, args.save_every, args.total_epochs, args.batch_size), args.nproc)
