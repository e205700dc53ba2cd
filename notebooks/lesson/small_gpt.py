"""A small GPT that is equal on all ranks, a batch for each rank, and text in other orders."""

import string
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_ref import initialize_ddp


def start(make: Callable[..., nn.Module], n_embd: int = 32) -> tuple[nn.Module, Tensor]:
    """Open the group and return a model of four blocks and this rank's batch, (8, 33).

    Odd ranks see only five different characters, so that the ranks' gradients differ a lot.
    """
    info = initialize_ddp()
    torch.set_num_threads(1)  # so that sums are added in the same order
    torch.manual_seed(0)
    model = make(string.printable, n_layer=4, n_head=2, n_embd=n_embd, block_size=32)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.1)  # in an untrained GPT the blocks have no effect
    torch.manual_seed(info.rank)
    ids = torch.randint(5 if info.rank % 2 else len(string.printable), (8, 33))
    return model.to(info.device), ids.to(info.device)


def loss_of(net: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of predicting each next character in `ids`, (batch, length + 1)."""
    logits = net(ids[:, :-1])  # (batch, length, characters)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def in_other_orders(text: str) -> dict[str, str]:
    """Return `text` and three reorderings of the same characters, by name."""
    generator = torch.Generator().manual_seed(0)
    words = text.split(" ")
    moved = [words[i] for i in torch.randperm(len(words), generator=generator)]
    mixed = [text[i] for i in torch.randperm(len(text), generator=generator)]
    return {
        "as written": text,
        "words shuffled": " ".join(moved),
        "backwards": text[::-1],
        "mixed": "".join(mixed),
    }
