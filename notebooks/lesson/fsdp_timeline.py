"""Draw what FSDP2 does in a step, and the memory that a rank holds, from a profiler's trace."""

import json
from pathlib import Path
from typing import Any

from .palette import COMMUNICATE, COMPUTE, MEMORY


def draw_timeline(path: str, weights: int, ranks: int) -> float:
    """Draw the trace of a training step with Adam, and return the peak in bytes per weight."""
    import matplotlib.pyplot as plt  # here, because ranks import this package, too

    trace = json.loads(Path(path).read_text())["traceEvents"]
    trace = sorted((event for event in trace if "ts" in event), key=lambda event: event["ts"])
    blocks = [e for e in trace if e["name"].startswith("FSDP::") and "(" in e["name"]]
    begin = blocks[0]["ts"]
    _, (top, bottom) = plt.subplots(2, sharex=True, figsize=(9, 5), height_ratios=(3, 2))
    gathered: dict[str, float] = {}
    shades = {"all_gather": 1, "post_backward_reduce": 0.4}
    for event in blocks:
        what, row = event["name"][6:-1].split(" (")
        start = (event["ts"] - begin) / 1000  # milliseconds
        end = start + event["dur"] / 1000
        if what in shades:
            top.barh(row, end - start, 0.6, left=start, color=COMMUNICATE, alpha=shades[what])
        elif what in ("pre_forward", "pre_backward"):
            gathered[row] = end
        elif what in ("post_forward", "post_backward_accumulate"):
            top.barh(row, start - gathered[row], 0.6, left=gathered[row], color=COMPUTE)
    top.set(ylabel="block")
    allocated = _memory(trace)
    shards = 12 / ranks  # weights and Adam's state, from before the step
    times = [(when - begin) / 1000 for when, _ in allocated]
    held = [shards + size / weights for _, size in allocated]
    bottom.plot(times, held, drawstyle="steps-post", color=MEMORY["weights"])
    bottom.axhline(16 / ranks, color="grey", linestyle="--")  # between steps
    bottom.set(xlabel="milliseconds", ylabel="bytes per weight", ylim=(0, None))
    plt.show()
    return max(held)


def _memory(trace: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """Return the bytes that were allocated in the step and are not free yet, over time.

    They are too many if the profiler misses what Gloo's threads free.
    """
    copied, live, found = 0.0, dict[int, int](), []
    for event in trace:
        if event["name"] == "c10d::_reduce_scatter_base_":
            copied = event["ts"] + event["dur"]  # leave out Gloo's copies, which NCCL does not make
        elif event["name"] == "[memory]":
            size, address = event["args"]["Bytes"], event["args"]["Addr"]
            live[address] = size if size > 0 and event["ts"] > copied else 0
            found.append((event["ts"], sum(live.values())))
    return found
