"""What a rank computes and what it sends during a step, in time, as torch.profiler saw it."""

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity, profile

Spans = list[tuple[float, float]]  # start and end, in milliseconds
STYLES = {"forward": ("C7", ""), "backward": ("C0", ""), "all-reduce": ("C1", "//")}


def record_timeline(step: Callable[[], object]) -> dict[str, Spans]:
    """Run a step under the profiler; return its spans, from the beginning of forward."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    spans: dict[str, Spans] = {kind: [] for kind in STYLES}
    for event in profiler.events():
        kind = _kind(event.name)
        if kind:
            spans[kind].append((event.time_range.start / 1000, event.time_range.end / 1000))
    zero = min(start for start, _ in spans["forward"])
    return {k: sorted((a - zero, b - zero) for a, b in found) for k, found in spans.items()}


def _kind(name: str) -> str | None:
    if name == "DistributedDataParallel.forward":
        return "forward"
    if name == "gloo:all_reduce":
        return "all-reduce"
    # AccumulateGrad is where DDP's hooks run: they start the all-reduces, and compute nothing.
    is_backward = name.startswith("autograd::engine::evaluate_function")
    return "backward" if is_backward and "AccumulateGrad" not in name else None


def draw_timelines(cases: dict[str, list[dict[str, Spans]]]) -> Figure:
    """Draw a panel a case, in it each rank's computation and below it its all-reduces."""
    figure, panels = plt.subplots(len(cases), 1, figsize=(8, 4.2), sharex=True)
    for axes, (title, ranks) in zip(panels, cases.items(), strict=True):
        for rank, spans in enumerate(ranks):
            _draw_rank(axes, 2.4 * rank, spans)
        rows = {
            2.4 * n + y: f"rank {n}: {what}"
            for n in range(len(ranks))
            for y, what in enumerate(("compute", "all-reduce"))
        }
        axes.set_yticks(list(rows), rows.values())
        axes.set_title(title, loc="left", fontsize=10)
        axes.invert_yaxis()
    panels[-1].set_xlabel("milliseconds since the rank's forward began")
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=color, hatch=hatch, edgecolor="white")
        for color, hatch in STYLES.values()
    ]
    figure.legend(handles, STYLES, loc="upper right", ncols=3)
    figure.tight_layout()
    return figure


def _draw_rank(axes: Axes, y: float, spans: dict[str, Spans]) -> None:
    for kind in ("forward", "backward"):
        bars = [(start, end - start) for start, end in spans[kind]]
        axes.broken_barh(bars, (y - 0.4, 0.8), color=STYLES[kind][0])
    color, hatch = STYLES["all-reduce"]
    for number, (start, end) in enumerate(spans["all-reduce"]):  # two can run at a time
        low = y + 0.6 + 0.4 * (number % 2)
        bar = [(start, end - start)]
        axes.broken_barh(bar, (low, 0.4), facecolor=color, hatch=hatch, edgecolor="black")
