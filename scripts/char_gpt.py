"""Train a character-level GPT on the text of Python's own help(), with ddp_ref.

python scripts/char_gpt.py --nproc 2       (takes two minutes on two cores)
torchrun --standalone --nproc-per-node=2 scripts/char_gpt.py
srun --nodes=2 --ntasks-per-node=2 --kill-on-bad-exit=1 python scripts/char_gpt.py

If SIGTERM stops a job of torchrun or srun, the ranks first save the current step. (Under srun,
SIGUSR1 does the same. It would kill torchrun.) With --nproc, you keep the checkpoint of the last
complete epoch. Run the same command again to resume from the newest checkpoint. When all epochs
are done, the script only generates text.
"""

import argparse
import math
import random
from pydoc_data.topics import topics

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import TensorDataset

from ddp_ref import (
    Callback,
    Handler,
    broadcast_object,
    cleanup_ddp,
    detect_launch,
    initialize_ddp,
    reduce_min,
)

# Data: text -> numbers -> rows


def read_text():
    """Return the text of all topics, without tables and without repeated paragraphs.

    A repeated paragraph could be in both the training and the validation text. Tables are mostly
    blanks.
    """
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n\n".join(p for p in dict.fromkeys(paragraphs) if "---+" not in p)


def encode(text, vocabulary):
    """Return each character's index in `vocabulary`, (len(text),)."""
    index = {character: number for number, character in enumerate(vocabulary)}
    return torch.tensor([index[character] for character in text])


def split(text):
    """Return the training text, which is the first nine tenths, and the validation text."""
    end = len(text) * 9 // 10
    return text[:end], text[end:]


def windows(ids, block_size):
    """Cut `ids` into rows, (rows, block_size + 1). Drop the characters that fill no row.

    Each row begins with the last character of the row before, so that every character but the
    first is predicted exactly once.
    """
    return ids.unfold(0, block_size + 1, block_size)


def pairs(rows):
    """Return a data set of inputs and targets. The target of a character is the next character."""
    return TensorDataset(rows[:, :-1], rows[:, 1:])


# Model: a pre-norm transformer without biases


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


class Block(nn.Module):
    """A transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self, n_head, n_embd):
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.out = nn.Linear(n_embd, n_embd, bias=False)
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=False)
        for last in (self.out, self.down):
            nn.init.zeros_(last.weight)  # so that a new block changes nothing

    def forward(self, x):  # (batch, length, n_embd) -> (batch, length, n_embd)
        x = x + self.out(self.attend(norm(x)))
        return x + self.down(F.gelu(self.up(norm(x))))

    def attend(self, x):
        heads = self.qkv(x).unflatten(2, (3, self.n_head, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (batch, n_head, length, n_embd / n_head)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return seen.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Predict the next character from up to `block_size` characters before it.

    The text differs between versions of Python, so a checkpoint also holds the vocabulary and the
    sizes of its model. To load it: `state = torch.load(path, weights_only=True)["model"]`, then
    `model = GPT(**state["_extra_state"])` and `model.load_state_dict(state)`.
    """

    def __init__(self, vocabulary, n_layer, n_head, n_embd, block_size):
        super().__init__()
        sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
        self.settings = {"vocabulary": vocabulary} | sizes
        self.vocabulary, self.block_size = vocabulary, block_size
        self.characters = nn.Embedding(len(vocabulary), n_embd)
        self.places = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block(n_head, n_embd) for _ in range(n_layer)))
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids):  # (batch, length) -> logits (batch, length, characters)
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.characters(ids) + self.places(places))
        return F.linear(norm(x), self.characters.weight)  # input and output share weights

    def log_likelihood(self, ids):
        """Return the log-probability of each row, (batch,), in nats, given its first character."""
        logits = self(ids[:, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return -losses.sum(1)

    @torch.no_grad()
    def sample(self, prompt, length, seed=0, temperature=0.7):
        """Return `prompt`, continued by `length` generated characters."""
        generator = torch.Generator().manual_seed(seed)
        ids = encode(prompt, self.vocabulary)
        for _ in range(length):
            context = ids[None, -self.block_size :].to(self.places.weight.device)
            logits = self(context)[0, -1].cpu()
            chances = F.softmax(logits / temperature, 0)  # (characters,)
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)])
        return "".join(self.vocabulary[number] for number in ids)

    def get_extra_state(self):
        return self.settings

    def set_extra_state(self, settings):
        for name, value in settings.items():
            if value != self.settings[name]:
                raise ValueError(
                    f"the checkpoint is from a model with {name} = {value!r}, but this model has "
                    f"{self.settings[name]!r}: use the same flags, or another --run-dir"
                )


# Training


def next_character_loss(logits, targets):
    """Return the mean cross-entropy, in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(step, steps):
    """Return the factor of the learning rate: warm-up for 5 % of `steps`, then a cosine decay."""
    warm_up = max(1, steps // 20)
    done = min(1, max(0, step - warm_up) / max(1, steps - warm_up))
    return min(1, (step + 1) / warm_up) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def pick_precision(device):
    """Return the fastest precision that all ranks' GPUs support, or fp32 on CPUs. Collective."""
    if device.type == "cpu":
        return "fp32"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if reduce_min({"bf16": has_bf16})["bf16"] else "fp16"


class Report(Callback):
    """Log, after each epoch, the bits per character and a short text that the model writes."""

    def __init__(self, prompt):
        self.prompt = prompt

    def on_epoch_end(self):
        text = self.handler.sample(self.prompt, 50)  # collective: never under `if rank == 0`
        bits = self.handler.val_losses[-1] / math.log(2)
        self.handler.log(f"{bits:.3f} bits per character | {text!r}")


def score(handler, ids, block_size):
    """Return the mean loss of `ids` in nats per character, on rank 0. Collective: all ranks call.

    The other ranks get None.
    """
    rows = windows(ids, min(block_size, len(ids) - 1))
    scores = handler.log_likelihood(rows, batch_size=64)
    return None if scores is None else -scores.double().sum().item() / rows[:, 1:].numel()


def train(rank, args, port):
    """Train, generate a text and score it. Collective: all ranks call it.

    With --nproc, `rank` and `port` come from this script. If they are None, a launcher has started
    this process and set its rank.
    """
    master = {} if rank is None else {"master_addr": "127.0.0.1", "master_port": port}
    info = initialize_ddp(rank=rank, world_size=args.nproc, **master)
    text = read_text()
    vocabulary = "".join(sorted(set(text)))
    train_ids, val_ids = (encode(part, vocabulary) for part in split(text))
    train_rows, val_rows = (windows(ids, args.block_size) for ids in (train_ids, val_ids))
    effective_batch = args.batch_size * info.world_size
    # Only full batches, so that no row is repeated. The last rows of the text are not used.
    steps = len(train_rows) // effective_batch
    torch.manual_seed(args.seed)
    model = GPT(vocabulary, args.n_layer, args.n_head, args.n_embd, args.block_size)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, args.lr, (0.9, 0.99), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate(n, steps * args.epochs))
    handler = Handler(
        model,
        optimizer,
        next_character_loss,
        scheduler=(schedule, "step"),
        callbacks=[Report(args.prompt)],
        clip_norm=1.0,
        precision=pick_precision(info.device),
        seed=args.seed,
        run_dir=args.run_dir,
    )
    handler.set_train_loader(pairs(train_rows[: steps * effective_batch]), args.batch_size)
    handler.set_val_loader(pairs(val_rows), args.batch_size)
    handler.load(args.run_dir)
    if info.rank == 0:
        size = sum(weight.numel() for weight in weights)
        print(f"text: {len(text):,} characters, {len(vocabulary)} distinct", end=" | ")
        print(f"model: {size:,} parameters")
        print(f"ranks: {info.world_size} | device: {info.device}", end=" | ")
        print(f"precision: {handler.precision} | steps per epoch: {steps}")
        print(f"{handler.epoch} of {args.epochs} epochs are done", flush=True)
    handler.train(args.epochs)
    written = broadcast_object(handler.sample(args.prompt, args.length, args.seed))
    ids = encode(written, vocabulary)
    parts = {"validation text": val_ids, "generated text": ids}
    parts["generated text, backwards"] = ids.flip(0)
    scores = {name: score(handler, part, args.block_size) for name, part in parts.items()}
    if info.rank == 0:
        print(f"\n{written}\n\nloss in nats per character:", end="")
        print(" |".join(f" {name} {loss:.3f}" for name, loss in scores.items()))
    cleanup_ddp()


# Command line


def parse_args():
    """Parse the flags. For a wrong value, print one line on stderr and exit with code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage=argparse.SUPPRESS,  # so that an error is one line, without the list of all flags
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("model").add_argument
    add("--n-layer", type=int, default=4, help="transformer blocks (4)")
    add("--n-head", type=int, default=4, help="attention heads in each block (4)")
    add("--n-embd", type=int, default=64, help="embedding size (64)")
    add("--block-size", type=int, default=64, help="context length in characters (64)")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=int, default=10, help="in total, including those already done (10)")
    add("--batch-size", type=int, default=8, help="rows per rank and step (8)")
    add(
        "--lr",
        type=float,
        default=8e-3,
        help="peak learning rate (0.008); a checkpoint's own rate wins",
    )
    add("--seed", type=int, default=0, help="for weights, order and generated text (0)")
    add("--nproc", type=int, help="processes to start; leave it out under a launcher")
    add(
        "--run-dir",
        default="runs/char_gpt",
        help="folder for checkpoints and history.csv (runs/char_gpt)",
    )
    add = parser.add_argument_group("text").add_argument
    add("--prompt", default="The ", help='beginning of the generated text ("The ")')
    add("--length", type=int, default=600, help="characters to generate (600)")
    args = parser.parse_args()
    text = read_text()
    train_part, val_part = split(text)
    for name, value in vars(args).items():
        if isinstance(value, int | float) and name != "seed" and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and finite, not {value}")
    if args.n_embd % args.n_head:
        parser.error(f"--n-embd {args.n_embd} is not a multiple of --n-head {args.n_head}")
    if not args.prompt:
        parser.error("--prompt is empty, but the model needs a character to start from")
    if unknown := "".join(sorted(set(args.prompt) - set(text))):
        parser.error(f"--prompt contains {unknown!r}, which does not occur in the text")
    if args.block_size >= len(val_part):
        parser.error(
            f"--block-size must be below {len(val_part)}, the length of the validation text"
        )
    try:
        ranks = args.nproc or detect_launch().world_size
    except ValueError as error:  # only some of the launcher's variables are set
        parser.error(str(error))
    rows = (len(train_part) - 1) // args.block_size
    if args.batch_size * ranks > rows:
        needed = (
            f"--batch-size {args.batch_size} on {ranks} ranks needs {args.batch_size * ranks} rows"
        )
        parser.error(f"{needed}, but the training text has only {rows}")
    return args


@record  # so that torchrun shows the traceback of the rank that failed first
def main():
    args = parse_args()
    if args.nproc is None:
        return train(None, args, None)
    port = random.randrange(20_000, 32_768)  # below the ports that Linux assigns by itself
    return mp.spawn(train, args=(args, port), nprocs=args.nproc)


if __name__ == "__main__":
    main()
