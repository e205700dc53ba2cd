"""A training loop in the style of nanoGPT, which uses only the core of ddp_ref.

torchrun --standalone --nproc-per-node=2 nanogpt.py 60
"""

import sys
from contextlib import nullcontext
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_ref import cleanup_ddp, initialize_ddp, on_rank, reduce_mean, seed_everything

# Sequences per rank and microbatch, tokens per sequence, microbatches per step over all ranks.
BATCH, BLOCK, MICRO_STEPS = 8, 32, 4
EVERY, EVAL_BATCHES, RATE = 20, 8, 3e-3

text = "\n".join(topics[name] for name in sorted(topics))
vocabulary = sorted(set(text))
ids = torch.tensor([vocabulary.index(character) for character in text[:100_000]])
data = {"train": ids[:90_000], "val": ids[90_000:]}


class GPT(nn.Module):
    def __init__(self, layers=2, heads=2, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(vocabulary), width), nn.Embedding(BLOCK, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(vocabulary))

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def get_batch(split, device):
    starts = torch.randint(len(data[split]) - BLOCK, (BATCH,)).tolist()
    rows = torch.stack([data[split][start : start + BLOCK + 1] for start in starts])
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


@torch.no_grad()
def estimate_loss(model, device):
    """Return the mean losses over the batches of all ranks; every rank must call."""
    model.eval()
    means = {}
    for split in data:
        losses = [model(*get_batch(split, device)) for _ in range(EVAL_BATCHES)]
        means[split] = torch.stack(losses).mean().item()
    model.train()
    return reduce_mean(means)


@on_rank(0)
def save(path, **content):
    torch.save(content, path)


def train(steps):
    info = initialize_ddp()
    assert MICRO_STEPS % info.world_size == 0
    micro_steps = MICRO_STEPS // info.world_size
    torch.manual_seed(1337)
    raw_model = GPT().to(info.device)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=RATE)
    model = DistributedDataParallel(raw_model) if info.distributed else raw_model
    seed_everything(1337, info.rank)  # every rank draws its own batches

    for step in range(steps):
        for micro_step in range(micro_steps):
            last = micro_step == micro_steps - 1
            with nullcontext() if last or not info.distributed else model.no_sync():
                loss = model(*get_batch("train", info.device)) / micro_steps
                loss.backward()
        torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % EVERY == 0:
            losses = estimate_loss(raw_model, info.device)
            save("ckpt.pt", model=raw_model.state_dict(), step=step + 1)
            if info.rank == 0:
                text = " | ".join(f"{split} {loss:.4f}" for split, loss in losses.items())
                print(f"step {step + 1} | {text}")
    return raw_model


if __name__ == "__main__":
    train(int(sys.argv[1]))
    cleanup_ddp()
