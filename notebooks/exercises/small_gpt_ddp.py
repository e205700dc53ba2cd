"""Train a small GPT on the text of Python's help(), with DDP:  torchrun ... small_gpt_ddp.py

This is the solution of an exercise in chapter 09. It also runs with plain python.
"""

import argparse
import math
import os
from contextlib import nullcontext
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

N_LAYER, N_HEAD, N_EMBD, BLOCK_SIZE = 2, 4, 64, 64
ACCUMULATE = 2  # microbatches per optimizer step


class GPT(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.characters = nn.Embedding(characters, N_EMBD)
        self.places = nn.Embedding(BLOCK_SIZE, N_EMBD)
        layer = nn.TransformerEncoderLayer(
            N_EMBD, N_HEAD, 4 * N_EMBD, 0.0, batch_first=True, norm_first=True, bias=False
        )
        self.blocks = nn.TransformerEncoder(layer, N_LAYER, enable_nested_tensor=False)
        self.head = nn.Linear(N_EMBD, characters, bias=False)

    def forward(self, ids):  # (batch, length) -> logits (batch, length, characters)
        length = ids.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        x = self.characters(ids) + self.places.weight[:length]
        return self.head(self.blocks(x, mask=causal, is_causal=True))


def rate(step, steps):
    """Return the factor of the learning rate: warm-up for a tenth of the steps, then a cosine."""
    warm_up = max(1, steps // 10)
    decay = 0.5 + 0.5 * math.cos(math.pi * min(1, step / steps))
    return min(1, (step + 1) / warm_up) * decay


def main(args):
    if "RANK" not in os.environ:  # plain python: a group of one
        one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(one, MASTER_ADDR="localhost", MASTER_PORT="0")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU for each rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    text = "\n\n".join(topics[name] for name in sorted(topics))[: args.characters]
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([index[character] for character in text])
    rows = ids.unfold(0, BLOCK_SIZE + 1, BLOCK_SIZE)
    train_rows, val_rows = rows[len(rows) // 10 :], rows[: len(rows) // 10]
    rows_per_step = args.batch_size * ACCUMULATE * world_size
    steps_per_epoch = len(train_rows) // rows_per_step
    train_rows = train_rows[: steps_per_epoch * rows_per_step]  # no step is smaller than the others
    train_data = TensorDataset(train_rows[:, :-1], train_rows[:, 1:])
    sampler: DistributedSampler = DistributedSampler(train_data)
    loader = DataLoader(train_data, args.batch_size, sampler=sampler, num_workers=2)
    val_part = val_rows[rank::world_size]  # no row twice

    model = DDP(GPT(len(index)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.99))
    steps = args.epochs * steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))

    def loss_of(net, inputs, targets):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = net(inputs.to(device))
            return F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())

    if rank == 0:
        print(f"device: {device} | steps: {steps} of {rows_per_step} rows each")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        train_loss = torch.zeros((), device=device)
        for batch, (inputs, targets) in enumerate(loader, start=1):
            last = batch % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                loss = loss_of(model, inputs, targets)
                (loss / ACCUMULATE).backward()
            train_loss += loss.detach() / len(loader) / world_size
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

        model.eval()
        val_loss = torch.zeros((), device=device)
        with torch.no_grad():
            for part in val_part.split(args.batch_size):
                part_loss = loss_of(model.module, part[:, :-1], part[:, 1:])
                val_loss += part_loss * len(part) / len(val_rows)
        dist.all_reduce(train_loss)
        dist.all_reduce(val_loss)
        if rank == 0:
            print(f"epoch {epoch} | train loss {train_loss:.4f} | validation loss {val_loss:.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "small_gpt.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--characters", type=int, default=100_000)
    main(parser.parse_args())
    dist.destroy_process_group()  # after main: the exit may hang while a DDP model still exists
