"""A loss that falls, between the losses of guesses that need no model."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


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
