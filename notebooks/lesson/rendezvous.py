"""Helpers for a rendezvous that fails: a common start, stable error texts, and the figure."""

import os
import re
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from matplotlib.figure import Figure

from .swimlane import Event, draw_swimlanes


def wait_for_all() -> None:
    """Return when every rank of this run is here, so that a late process cannot change the result.

    The ranks form a group as `run_ranks` planned, and close it. Then they may try another way.
    """
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    # From here on rank 0 hosts the store of a new group, as it does under mp.spawn.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def error_text(error: Exception) -> str:
    """Return the first line of an error, without what changes from run to run."""
    text = str(error).splitlines()[0]
    text = re.sub(r"useIpv6: \w+, code: -?\d+, ", "", text)
    text = re.sub(r"(port: |, )\d{5}", r"\1PORT", text)
    return re.sub(r"after \d+ seconds", "after N seconds", text)


def draw_rendezvous(runs: Mapping[str, Sequence[Sequence[Event]]]) -> Figure:
    """Draw one panel per rendezvous (title -> events by process).

    The lanes are called processes, not ranks, because two of them may claim the same rank.
    """
    figure = draw_swimlanes(runs, waits="waits in init_process_group")
    for panel, lanes in zip(figure.axes, runs.values(), strict=False):
        panel.set_yticks(
            range(len(lanes)), [f"process {'AB'[place]}" for place in range(len(lanes))]
        )
    return figure
