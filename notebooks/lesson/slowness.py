"""Where the time of a slow job goes, drawn per rank."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .palette import COMMUNICATE, COMPUTE, LOAD, WAIT

PARTS = {  # the name of a part, its colour and its hatch
    "load": (LOAD, ""),
    "compute": (COMPUTE, ""),
    "wait": (WAIT, "///"),
    "all-reduce": (COMMUNICATE, "//"),
}
MEANING = {"wait": "wait for another rank"}


def draw_time_spent(jobs: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Draw one panel per job, and in it one stacked bar per rank.

    Args:
        jobs: Title -> by rank, the milliseconds per step of each of PARTS.
    """
    figure, panels = plt.subplots(1, len(jobs), figsize=(9, 2.6), layout="constrained")
    for panel, (title, ranks) in zip(panels, jobs.items(), strict=True):
        names = [f"rank {rank}" for rank in range(len(ranks))]
        starts = [0.0] * len(ranks)
        for part, (color, hatch) in PARTS.items():
            lengths = [rank[part] for rank in ranks]
            label = MEANING.get(part, part)
            panel.barh(
                names, lengths, left=starts, color=color, hatch=hatch, ec="white", label=label
            )
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        panel.invert_yaxis()
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_xlabel("ms per step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    return figure
