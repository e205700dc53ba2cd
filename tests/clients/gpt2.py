"""Train Hugging Face's GPT-2 from scratch on padded text, with exact means over its tokens."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

from ddp_ref import Handler, cleanup_ddp

IGNORE = -100  # the label of a token that has no loss


def texts(size, seed=0):
    """Return sequences of 3 to 20 tokens; each token is the one before plus 1, 2 or 3."""
    generator = torch.Generator().manual_seed(seed)
    steps = [torch.randint(1, 4, (3 + 7 * n % 18,), generator=generator) for n in range(size)]
    return [step.cumsum(0) % 32 for step in steps]


def collate(rows):
    lengths = torch.tensor([len(row) for row in rows])
    ids = pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    labels = ids.masked_fill(~mask, IGNORE)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def new_model():
    sizes = {"vocab_size": 32, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def forward(model, batch):
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()


def count(batch):
    return (batch["labels"][:, 1:] != IGNORE).sum()


def new_handler(model, optimizer, **options):
    return Handler(
        model, optimizer, nn.functional.cross_entropy, forward=forward, count=count, **options
    )


def train(epochs=4):
    torch.manual_seed(0)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handler = new_handler(model, optimizer, accumulate=2)
    handler.set_train_loader(texts(256), batch_size=8, collate_fn=collate)
    handler.set_val_loader(texts(53, seed=1), batch_size=8, collate_fn=collate)
    handler.train(epochs)
    return handler


if __name__ == "__main__":
    handler = train()
    if handler.rank == 0:
        print(f"validation loss per token {handler.val_losses[-1]:.4f}")
    cleanup_ddp()
