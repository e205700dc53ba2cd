"""Train on several nodes under Slurm, with one rank per task.

srun --nodes=2 --ntasks-per-node=2 --kill-on-bad-exit=1 python scripts/multinode_slurm.py
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import datautils

NEEDS_NEW_STORE = (
    "error: --max-restarts needs a new store for each attempt (pytorch issue 135712): run "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun, with --standalone or --rdzv-backend=c10d"
)


def adopt_slurm_step(env):
    """Set torchrun's variables from Slurm's, or for one process outside a step of several tasks."""
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1:  # SLURM_NTASKS is set outside a step as well
        if int(env.get("WORLD_SIZE", 1)) > 1:  # each process would train alone
            sys.exit("error: LOCAL_WORLD_SIZE is not set: start this script with torchrun or srun")
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        env.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # 0: any free port
        return
    ranks_here = env["SLURM_GTIDS"].split(",")
    env.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"])
    env.update(LOCAL_RANK=env["SLURM_LOCALID"], LOCAL_WORLD_SIZE=str(len(ranks_here)))
    if "MASTER_ADDR" not in env:  # rank 0 runs on the first node of this step, not of the job
        command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        env["MASTER_ADDR"] = subprocess.check_output(command, text=True).split()[0]
    # Every rank computes the same port. Another step of this job gets another one.
    port = 10_000 + (int(env["SLURM_JOB_ID"]) * 61 + int(env["SLURM_STEP_ID"])) % 20_000
    env.setdefault("MASTER_PORT", str(port))


def ddp_setup(local_rank, local_ranks, wanted):
    """Join the process group and return this rank's device. Collective: every rank calls it."""
    gpus = torch.cuda.device_count()
    if gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        # Under srun --gpus-per-task=1, a task sees only its own GPU, as number 0.
        gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", 1))
        local_rank = 0
    if wanted == "cuda" and gpus < local_ranks:
        sys.exit(f"error: --device cuda needs {local_ranks} GPUs, found {gpus}: use --device cpu")
    if wanted == "cpu" or gpus < local_ranks:  # each rank needs its own GPU
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks share the cores of this machine
            torch.set_num_threads(max(1, torch.get_num_threads() // local_ranks))
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def share_snapshot(args, world_size):
    """Give every rank the snapshot that rank 0 has read. Collective: every rank calls it."""
    written = [None] * world_size
    dist.all_gather_object(written, args.snapshot and args.checkpoint.stat().st_mtime)
    if len(set(written)) > 1:  # the nodes share no disk
        snapshot = [args.snapshot]
        dist.broadcast_object_list(snapshot)  # pickled as a whole: this takes seconds per GB
        args.snapshot = snapshot[0]


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, loss_fn, device, args):
        self.model = model.to(device)
        self.train_data = train_data
        self.test_data = test_data
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.device = device
        self.args = args
        self.rank = dist.get_rank()
        self.epochs_run = 0
        if args.snapshot:
            self._load_snapshot(args.snapshot)
        device_ids = [device.index] if device.type == "cuda" else None
        self.model = DDP(self.model, device_ids=device_ids)  # broadcasts rank 0's weights

    def _load_snapshot(self, snapshot):
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        self.model.train()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, samples
        for source, targets in self.train_data:  # (batch, features), (batch,)
            source, targets = source.to(self.device), targets.to(self.device)
            loss = self._run_batch(source, targets)
            totals[0] += loss * len(targets)  # back from the batch's mean to its sum
            totals[1] += len(targets)
        dist.all_reduce(totals)  # sums over the ranks
        return (totals[0] / totals[1]).item()

    def _evaluate(self):
        self.model.eval()
        totals = datautils.count_right(self.model.module, self.test_data, self.device)
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()

    def _save_snapshot(self, epoch):
        snapshot = {"model": self.model.module.state_dict(), "epochs_run": epoch + 1}
        snapshot["optimizer"] = self.optimizer.state_dict()
        datautils.write_checkpoint(self.args.checkpoint, snapshot)
        print(f"epoch {epoch + 1} | saved {self.args.checkpoint}")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            loss = self._run_epoch(epoch)
            accuracy = self._evaluate()
            if self.rank > 0:
                continue  # only rank 0 prints and saves
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
    sampler = DistributedSampler(dataset, seed=args.seed)  # each rank draws its own shard
    # With data that takes time to load, add num_workers=4 and, on a GPU, pin_memory=True.
    return DataLoader(dataset, args.batch_size, sampler=sampler)


@record  # so that torchrun shows the traceback of the rank that failed first
def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = ddp_setup(local_rank, local_ranks, args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} is local rank {local_rank} on {os.uname().nodename}, {device}")
    share_snapshot(args, world_size)
    train_set, test_set, model, optimizer, loss_fn = load_train_objs(args)
    datautils.check_fits(args.checkpoint, args.snapshot, model)
    train_data = prepare_dataloader(train_set, args)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each item exactly once
    test_data = DataLoader(test_shard, args.batch_size)
    trainer = Trainer(model, train_data, test_data, optimizer, loss_fn, device, args)
    if rank == 0:
        batch = args.batch_size * world_size
        gpus = torch.cuda.device_count()
        print(f"ranks: {world_size} | device: {device.type} ({gpus} GPUs visible)", end=" | ")
        print(f"effective batch: {batch} | steps per epoch: {len(train_data)}")
        print(f"{args.checkpoint}: {trainer.epochs_run} of {args.epochs} epochs are done")
    trainer.train(args.epochs)
    del trainer  # its DDP model holds the group, whose threads must end before Python does
    dist.destroy_process_group()


if __name__ == "__main__":
    args = datautils.parse_args(__doc__, checkpoint="snapshot.pt")
    env = os.environ
    if "LOCAL_WORLD_SIZE" not in env:  # torchrun sets it; some containers set only the others
        adopt_slurm_step(env)
    shares_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # one store for all attempts
    if shares_store and env["TORCHELASTIC_MAX_RESTARTS"] != "0":
        is_first = env["RANK"] == env["TORCHELASTIC_RESTART_COUNT"] == "0"
        sys.exit(NEEDS_NEW_STORE if is_first else 1)  # one message is enough
    args.snapshot = datautils.read_checkpoint(args.checkpoint, "model", "optimizer", "epochs_run")
    main(args)
