"""A falling validation loss, beside the losses of two guesses that need no model."""

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from .palette import REFERENCE


def guess_losses(train_ids: Tensor, val_ids: Tensor) -> dict[str, float]:
    """Return the mean loss of two guesses on `val_ids`, in nats per character.

    The first gives every character the same probability, the second its frequency in `train_ids`.
    Both arguments are vectors of character indices.
    """
    size = 1 + int(max(train_ids.max(), val_ids.max()))
    counts = torch.bincount(train_ids, minlength=size) + 1  # no character is impossible
    by_count = -(counts / counts.sum()).log()[val_ids].mean().item()
    return {
        "every character equally likely": math.log(size),
        "as frequent as in the training text": by_count,
    }


def draw_learning_curve(losses: list[float], guesses: dict[str, float]) -> Figure:
    """Draw the loss after each epoch, and a horizontal line for each guess."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    axes.plot(range(1, len(losses) + 1), losses, "o-", color=REFERENCE, label="the model")
    for (name, loss), style in zip(guesses.items(), ("--", ":"), strict=True):
        axes.axhline(loss, color=REFERENCE, linestyle=style, label=name)
    axes.set_xticks(range(1, len(losses) + 1))
    axes.set(xlabel="epoch", ylabel="validation loss\n(nats per character)", ylim=(0, None))
    axes.legend(loc="lower left")
    figure.tight_layout()
    return figure
