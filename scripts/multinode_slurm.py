"""Train on several nodes under Slurm, with one rank per task.

srun --nodes=2 --ntasks-per-node=2 --kill-on-bad-exit=1 python scripts/multinode_slurm.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import datautils


def adopt_slurm_step(env):
    """Set torchrun's variables from those of a Slurm step; outside any launch, for one process."""
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # SLURM_NTASKS is set outside a step as well
        first_host, port, local_ranks = datautils.read_slurm_step(env)
        env.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"])
        env.update(LOCAL_RANK=env["SLURM_LOCALID"], LOCAL_WORLD_SIZE=local_ranks)
        env.setdefault("MASTER_ADDR", first_host)  # of the step, where rank 0 runs
        env.setdefault("MASTER_PORT", port)
    else:
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # 0: any free port


def ddp_setup(device):
    """Join the process group that the variables describe. Collective: every rank calls it."""
    datautils.share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))
    gpu = device if device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    store, backend = datautils.open_store(), "nccl" if gpu else "gloo"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=gpu)


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, loss_fn, device, args):
        self.model, self.optimizer, self.loss_fn = model.to(device), optimizer, loss_fn
        self.train_data, self.test_data = train_data, test_data
        self.device, self.args, self.rank = device, args, dist.get_rank()
        self.epochs_run = self._load_snapshot(args.snapshot) if args.snapshot else 0
        self.model = DDP(self.model)  # broadcasts the weights of rank 0

    def _load_snapshot(self, snapshot):
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        return snapshot["epochs_run"]

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

    def _save_snapshot(self, epoch):
        state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        datautils.write_checkpoint(self.args.checkpoint, state | {"epochs_run": epoch + 1})
        print(f"epoch {epoch + 1} | saved {self.args.checkpoint}")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            loss, accuracy = self._run_epoch(epoch), self._evaluate()
            if self.rank > 0:
                continue
            print(f"epoch {epoch + 1} | loss {loss:.4f} | test accuracy {accuracy:.4f}")
            if (epoch + 1) % self.args.save_every == 0 or epoch + 1 == max_epochs:
                self._save_snapshot(epoch)


def load_train_objs(args):
    train_set, test_set, (features, outputs), loss_fn = datautils.load_dataset(args.dataset)
    torch.manual_seed(args.seed)  # the initial weights
    model = nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, outputs))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    return train_set, test_set, model, optimizer, loss_fn


def prepare_dataloader(dataset, args):
    return DataLoader(dataset, args.batch_size, sampler=DistributedSampler(dataset, seed=args.seed))


@record  # so that torchrun shows the traceback of the rank that failed first
def main(args):
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device, why = datautils.pick_device(args.device, local_rank, local_ranks)
    ddp_setup(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} is local rank {local_rank} on {os.uname().nodename}, {device}")
    dist.broadcast_object_list(box := [args.snapshot])  # rank 0's: the nodes may share no disk
    args.snapshot = box[0]
    train_set, test_set, model, optimizer, loss_fn = load_train_objs(args)
    datautils.check_fits(args.checkpoint, args.snapshot, model)
    train_data = prepare_dataloader(train_set, args)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each item once in all
    test_data = DataLoader(test_shard, args.batch_size)
    trainer = Trainer(model, train_data, test_data, optimizer, loss_fn, device, args)
    if rank == 0:
        batch = args.batch_size * world_size
        print(f"{why} | effective batch {batch} | {len(train_data)} optimizer steps an epoch")
        print(f"{args.checkpoint}: {trainer.epochs_run} of {args.epochs} epochs are done")
    trainer.train(args.epochs)
    del trainer  # DDP holds the group, whose threads must end before Python does
    dist.destroy_process_group()


if __name__ == "__main__":
    args = datautils.parse_args(__doc__, checkpoint="snapshot.pt")
    if "RANK" not in os.environ:  # torchrun has not started it
        adopt_slurm_step(os.environ)
    args.snapshot = datautils.read_checkpoint(args.checkpoint, "model", "optimizer", "epochs_run")
    main(args)
