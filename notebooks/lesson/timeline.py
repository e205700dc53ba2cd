"""What a rank computes and what it sends during a step, in time, as torch.profiler saw it."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.profiler import ProfilerActivity, profile

from .palette import COMMUNICATE, COMPUTE

Spans = list[tuple[float, float]]  # start and end, in milliseconds
# Forward is a light blue, backward the full one: both compute.
STYLES: dict[str, dict[str, Any]] = {
    "forward": {"facecolor": COMPUTE, "alpha": 0.45},
    "backward": {"facecolor": COMPUTE},
    "all-reduce": {"facecolor": COMMUNICATE, "hatch": "//", "edgecolor": "white"},
}


def record_timeline(step: Callable[[], object]) -> dict[str, Spans]:
    """Run a step under the profiler; return its spans, from the beginning of forward."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    spans: dict[str, Spans] = {kind: [] for kind in STYLES}
    for event in profiler.events():
        kind = kind_of(event.name)
        if kind:
            spans[kind].append((event.time_range.start / 1000, event.time_range.end / 1000))
    zero = min(start for start, _ in spans["forward"])
    return {k: sorted((a - zero, b - zero) for a, b in found) for k, found in spans.items()}


def kind_of(name: str) -> str | None:
    """Return which of the three kinds of span an event of the profiler is, if any."""
    if name == "DistributedDataParallel.forward":
        return "forward"
    if name == "gloo:all_reduce":
        return "all-reduce"
    # AccumulateGrad is where DDP's hooks run: they start the all-reduces, and compute nothing.
    is_backward = name.startswith("autograd::engine::evaluate_function")
    return "backward" if is_backward and "AccumulateGrad" not in name else None


def overlaps(spans: dict[str, Spans]) -> int:
    """Return how many all-reduces began while backward computed."""
    computed = max(end for _, end in spans["backward"])
    return sum(start < computed for start, _ in spans["all-reduce"])


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
    figure.legend(handles=_keys(), loc="upper right", ncols=3)
    figure.tight_layout()
    return figure


def _keys() -> list[Patch]:
    return [Patch(label=kind, **style) for kind, style in STYLES.items()]


def _draw_rank(axes: Axes, y: float, spans: dict[str, Spans]) -> None:
    for kind in ("forward", "backward"):
        bars = [(start, end - start) for start, end in spans[kind]]
        axes.broken_barh(bars, (y - 0.4, 0.8), **STYLES[kind])
    for number, (start, end) in enumerate(spans["all-reduce"]):  # two can run at a time
        low = y + 0.6 + 0.4 * (number % 2)
        axes.broken_barh([(start, end - start)], (low, 0.4), **STYLES["all-reduce"])


def read_trace(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return a trace file's forward, backward and all-reduces, and the id of the main thread.

    The small operations in them are left out. Each span has its kind under "kind".
    """
    events = json.loads(file.read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]  # the others have no duration
    spans = [bar | {"kind": kind} for bar in bars if (kind := kind_of(bar["name"]))]
    return spans, next(span["tid"] for span in spans if span["kind"] == "backward")


def draw_trace(spans: Iterable[Mapping[str, Any]], main_thread: int) -> Figure:
    """Draw the spans of a trace file as Perfetto does, a row a thread, the main thread first."""
    spans = list(spans)
    zero = min(event["ts"] for event in spans)
    threads = sorted({event["tid"] for event in spans}, key=lambda tid: (tid != main_thread, tid))
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(threads) + 1.2), layout="constrained")
    for kind, style in STYLES.items():  # backward over forward, which it never overlaps
        for row, thread in enumerate(threads):
            mine = [e for e in spans if e["tid"] == thread and e["kind"] == kind]
            bars = [((e["ts"] - zero) / 1000, e["dur"] / 1000) for e in mine]
            axes.broken_barh(bars, (row - 0.35, 0.7), **style)
    names = ["python" if thread == main_thread else "pt_gloo_runloop" for thread in threads]
    axes.set_yticks(range(len(threads)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    figure.legend(handles=_keys(), loc="outside upper center", ncols=3, frameon=False)
    return figure
