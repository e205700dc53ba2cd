"""A loss that falls, between the losses of guesses that need no model."""

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor


def guess_losses(train_ids: Tensor, val_ids: Tensor) -> dict[str, float]:
    """Return the mean loss on `val_ids` of two guesses without a model, in nats a character.

    Each character alike, and each as often as in `train_ids`; both are vectors of indices.
    """
    size = 1 + int(max(train_ids.max(), val_ids.max()))
    counts = torch.bincount(train_ids, minlength=size) + 1  # none has no chance
    by_count = -(counts / counts.sum()).log()[val_ids].mean().item()
    return {"each character alike": math.log(size), "as often as in the text": by_count}


def draw_learning_curve(losses: list[float], guesses: dict[str, float]) -> Figure:
    """Draw the loss after each epoch, and a line for each guess."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    axes.plot(range(1, len(losses) + 1), losses, "o-", color="tab:blue", label="the model")
    for (name, loss), style in zip(guesses.items(), ("--", ":"), strict=True):
        axes.axhline(loss, color="black", linestyle=style, label=name)
    axes.set_xticks(range(1, len(losses) + 1))
    axes.set(xlabel="epoch", ylabel="validation loss\n(nats a character)", ylim=(0, None))
    axes.legend(loc="lower left")
    figure.tight_layout()
    return figure
