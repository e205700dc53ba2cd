"""Figures of what an all-reduce costs over a link, measured and computed."""

from collections.abc import Collection, Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .cost_model import Link, all_reduce_seconds, backward_seconds, bytes_per_second
from .palette import COMMUNICATE, COMPUTE, REFERENCE


def draw_fit(
    seconds: Mapping[int, float], left_out: Collection[int], link: Link, world_size: int
) -> Figure:
    """Draw measured all-reduces by payload, those the fit did not see, and the fitted line."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    used = [size for size in seconds if size not in left_out]
    fitted = [
        1e3 * all_reduce_seconds(s, world_size, link.bandwidth, link.latency) for s in seconds
    ]
    axes.loglog(list(seconds), fitted, "--", color=REFERENCE, label="the model, after the fit")
    for sizes, marker, fill, label in (
        (used, "o", COMMUNICATE, "measured, used in the fit"),
        (sorted(left_out), "s", "white", "measured, left out"),
    ):
        times = [1e3 * seconds[size] for size in sizes]
        axes.loglog(
            sizes, times, marker, color=COMMUNICATE, markerfacecolor=fill, markersize=8, label=label
        )
    labels = {2**10: "1 KiB", 2**14: "16 KiB", 2**18: "256 KiB", 2**22: "4 MiB", 2**25: "32 MiB"}
    axes.set_xticks(list(labels), list(labels.values()))
    axes.minorticks_off()
    note = f"latency {1e3 * link.latency:.2f} ms, bus bandwidth {link.bandwidth / 1e9:.2f} GB/s"
    axes.set(xlabel="payload on each of 2 ranks", ylabel="milliseconds", title=note)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def draw_break_even(
    payload: float,
    world_size: int,
    links: Mapping[str, float],
    parameters: float,
    operations_per_second: float,
) -> Figure:
    """Draw backward's time over the samples of a rank, and each link's all-reduce as a level.

    Where backward's line crosses a level, that link's all-reduce is as long as backward.

    Args:
        payload: Bytes that are all-reduced in a step.
        world_size: Ranks.
        links: Gigabits a second, in one direction, by the name of a link.
        parameters: Of the model.
        operations_per_second: What the device reaches.

    Returns:
        The figure.
    """
    figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    samples = [2.0**k for k in range(8, 21)]
    backward = [1e3 * backward_seconds(parameters, n, operations_per_second) for n in samples]
    axes.loglog(samples, backward, color=COMPUTE, linewidth=3, label="backward")
    styles = ["-", "--", "-.", ":", (0, (1, 4))]
    for (name, gigabits), style in zip(links.items(), styles, strict=False):
        level = 1e3 * all_reduce_seconds(payload, world_size, bytes_per_second(gigabits))
        axes.axhline(level, color=COMMUNICATE, linestyle=style)
        low = name.startswith("PCIe")  # its level is just below another one
        align = "top" if low else "bottom"
        axes.text(samples[0], level * (0.92 if low else 1.06), name, fontsize=9, va=align)
    axes.set(xlabel="samples (tokens) per rank and step", ylabel="milliseconds")
    axes.plot([], [], color=COMMUNICATE, label="all-reduce, over each link")
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.3)
    return figure
