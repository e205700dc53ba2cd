"""Train a Hugging Face BERT classifier from scratch: dicts, accumulation, cosine, bf16."""

import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification, get_cosine_schedule_with_warmup

from ddp_ref import Handler, cleanup_ddp


def sentences(size, seed=0):
    """Return sequences of 4 to 15 tokens; the label says whether token 7 is among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(size):
        tokens = torch.randint(8, 40, (4 + number % 12,), generator=generator)
        if number % 2:
            tokens[torch.randint(0, len(tokens), (1,), generator=generator)] = 7
        rows.append({"input_ids": tokens, "labels": torch.tensor(number % 2)})
    return rows


def collate(rows):
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=0)
    labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def new_model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=40, num_hidden_layers=2, max_position_embeddings=16, num_labels=2, **sizes
    )
    return BertForSequenceClassification(config)


def forward(model, batch):
    return model(**batch), batch["labels"]


def loss_fn(outputs, labels):
    return outputs.loss


def accuracy(outputs, labels):
    return (outputs.logits.argmax(1) == labels).double().mean()


def train(run_dir, epochs=8, callbacks=()):
    torch.manual_seed(0)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 10, num_training_steps=8 * epochs)
    handler = Handler(
        model,
        optimizer,
        loss_fn,
        forward=forward,
        metrics={"accuracy": accuracy},
        scheduler=(schedule, "step"),  # after each optimizer step
        accumulate=2,
        clip_norm=1.0,
        precision="bf16",
        callbacks=callbacks,
        run_dir=run_dir,
    )
    handler.set_train_loader(sentences(256), batch_size=8, collate_fn=collate)
    handler.set_val_loader(sentences(75, seed=1), batch_size=8, collate_fn=collate)
    handler.load(run_dir)
    handler.train(epochs)
    return handler


if __name__ == "__main__":
    handler = train(sys.argv[1])
    if handler.rank == 0:
        print(f"validation accuracy {handler.val_metrics['accuracy'][-1]:.4f}")
    cleanup_ddp()
