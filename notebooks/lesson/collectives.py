"""How many collectives some work takes, as the profiler saw them."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity


def count_all_reduces(work: Callable[[], object]) -> int:
    """Return how many all-reduces of gloo ran on this rank during `work`, DDP's own included."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        work()
    return sum(event.name == "gloo:all_reduce" for event in profile.events())


def draw_all_reduces(counts: dict[str, int], steps: int) -> Figure:
    """Draw how many all-reduces each loop took; `steps` of them are DDP's, for the gradients."""
    figure, panel = plt.subplots(figsize=(7, 2.2), layout="constrained")
    names = list(counts)
    rest = [count - steps for count in counts.values()]
    panel.barh(names, steps, color="tab:blue", label="gradients, by DDP")
    bars = panel.barh(names, rest, left=steps, color="tab:orange", hatch="//", label="all else")
    panel.bar_label(bars, [str(count) for count in counts.values()], padding=4)
    panel.set(xlabel=f"all-reduces in {steps} steps", xlim=(0, 1.15 * max(counts.values())))
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure
