"""Train in processes that this script starts:  python scripts/multigpu_spawn.py --nproc 2"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import datautils


def ddp_setup(rank, world_size, device, port):
    """Join the process group. Collective: every rank calls it, none returns before all have."""
    datautils.share_cores(world_size)
    gpu = device if device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    store = dist.TCPStore("127.0.0.1", port)  # where the ranks find each other
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=gpu)


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, loss_fn, device, args):
        self.model, self.optimizer, self.loss_fn = model.to(device), optimizer, loss_fn
        self.train_data, self.test_data = train_data, test_data
        self.device, self.args, self.rank = device, args, dist.get_rank()
        self.model = DDP(self.model)  # broadcasts the weights of rank 0

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)  # without it, every epoch has the same order
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, samples
        for source, targets in self.train_data:  # (batch, features), (batch,)
            source, targets = source.to(self.device), targets.to(self.device)
            totals[0] += self._run_batch(source, targets) * len(targets)
            totals[1] += len(targets)
        dist.all_reduce(totals)  # the sum over the ranks
        return (totals[0] / totals[1]).item()

    def _evaluate(self):
        totals = datautils.count_right(self.model.module, self.test_data, self.device)
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()

    def _save_checkpoint(self, epoch):
        datautils.write_checkpoint(self.args.checkpoint, self.model.module.state_dict())
        print(f"epoch {epoch + 1} | saved {self.args.checkpoint}")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            loss, accuracy = self._run_epoch(epoch), self._evaluate()
            if self.rank > 0:
                continue
            print(f"epoch {epoch + 1} | loss {loss:.4f} | test accuracy {accuracy:.4f}")
            if (epoch + 1) % self.args.save_every == 0 or epoch + 1 == max_epochs:
                self._save_checkpoint(epoch)


def load_train_objs(args):
    train_set, test_set, (features, outputs), loss_fn = datautils.load_dataset(args.dataset)
    torch.manual_seed(args.seed)  # the initial weights
    model = nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, outputs))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    return train_set, test_set, model, optimizer, loss_fn


def prepare_dataloader(dataset, args):
    return DataLoader(dataset, args.batch_size, sampler=DistributedSampler(dataset, seed=args.seed))


def main(rank, world_size, args, port):
    device, why = datautils.pick_device(args.device, local_rank=rank, local_ranks=world_size)
    ddp_setup(rank, world_size, device, port)
    train_set, test_set, model, optimizer, loss_fn = load_train_objs(args)
    train_data = prepare_dataloader(train_set, args)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each item once in all
    test_data = DataLoader(test_shard, args.batch_size)
    trainer = Trainer(model, train_data, test_data, optimizer, loss_fn, device, args)
    if rank == 0:
        batch = args.batch_size * world_size
        print(f"{why} | effective batch {batch} | {len(train_data)} optimizer steps an epoch")
    trainer.train(args.epochs)
    del trainer  # DDP holds the group, whose threads must end before Python does
    dist.destroy_process_group()


if __name__ == "__main__":
    args = datautils.parse_args(__doc__, checkpoint="checkpoint.pt", nproc=2)
    datautils.read_checkpoint(args.checkpoint)  # refuses to overwrite any other file
    datautils.pick_device(args.device, local_rank=0, local_ranks=args.nproc)  # exits if wrong
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # on a free port
    mp.spawn(main, args=(args.nproc, args, store.port), nprocs=args.nproc)
