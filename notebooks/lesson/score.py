"""Measure a stage of myddp.py, and PyTorch's way, between two ranks on a slowed network."""

import json
import os
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_ref import run_ranks

from . import myddp
from .commands import ROOT
from .cost_model import Link, bytes_per_second
from .palette import COMMUNICATE, COMPUTE, WAIT
from .prediction import time_all_reduces, time_step
from .record import Log, recorded
from .trial import WEIGHTS, Batch, Way, batch, bytes_held, loss_of, new_gpt

MEGABITS = 200  # a second, shared by both ranks
ROWS, STEPS, WARM_UP = 32, 12, 3  # of a rank's batch; steps
COLUMNS = "ms a step", "ms exposed", "KB sent", "bytes per weight"
# A network of its own, in which only this command's processes are slowed down.
SLOWED = f"""
ip link set lo mtu 1500 up
tc qdisc add dev lo root tbf rate {MEGABITS}mbit burst 16kb latency 1s
exec "$@"
"""
TABLE = myddp.KEPT.with_suffix(".json")  # what was measured, by stage


def show(stage: int) -> None:
    """Measure a stage, and show the reader's table and the timeline of a step."""
    unshare = ["unshare", "--map-root-user", "--net", "sh", "-ec", SLOWED, "sh"]
    command = [*unshare, sys.executable, "-m", "lesson.score", str(stage)]
    path = os.pathsep.join([str(myddp.CHAPTERS), str(ROOT)])
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).splitlines()[-1]
        print(f"not measured, because no slowed network can be made here: {why}")
        return
    measured = json.loads(done.stdout.splitlines()[-1])
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table[str(stage)] = {name: measured[name] for name in ("predicted", "yours", "PyTorch's")}
    TABLE.write_text(json.dumps(table, indent=1))
    print(_as_text(table))
    _draw(measured["timeline"])


def _as_text(table: dict[str, dict[str, list[float]]]) -> str:
    lines = [" | ".join(["stage        ", *COLUMNS])]
    for stage, ways in sorted(table.items()):
        for name, row in ways.items():
            numbers = [f"{x:.1f}".rjust(len(c)) for c, x in zip(COLUMNS, row, strict=False)]
            equal = ["equal"] * (name == "yours")  # `check` has found out
            lines.append(" | ".join([f"{stage} {name:11}", *numbers, *equal]))
    return "\n".join(lines)


def measure(stage: int) -> dict[str, Any]:
    """Take steps in both ways, and without sending, in turn; return what they cost (collective)."""
    module, own = import_module(f"exercises.stage_{stage}"), myddp.load()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    [latency] = time_all_reduces([4]).values()
    link = Link(latency, bytes_per_second(MEGABITS / 1000) / dist.get_world_size())
    ways, held = {}, {}
    for name, make in {"PyTorch's": module.torchs_way, "yours": lambda: module.way(own)}.items():
        before = bytes_held()
        ways[name] = make()
        ways[name].step(batch(0, ROWS))
        held[name] = (bytes_held() - before) / WEIGHTS
    rows: dict[str, list[Any]] = {name: [] for name in ways}
    alone, model = [], new_gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(WARM_UP + STEPS):
        mine = batch(step, ROWS)
        alone.append(time_step(optimizer, loss_of, model, mine))
        for name, way in ways.items():
            row, timeline = _take_step(way, mine)
            rows[name].append(row)
    slower = torch.tensor(alone)
    dist.all_reduce(slower, dist.ReduceOp.MAX)  # the ranks wait for the slower one in every step
    dist.destroy_process_group()
    compute, exposed, sent = module.predict(*_medians(slower.tolist()), link)
    result = {"predicted": [1000 * (compute + exposed), 1000 * exposed, sent / 1000]}
    for name in ways:
        milliseconds, kilobytes = _medians(rows[name])
        exposed = milliseconds - 1000 * compute
        result[name] = [milliseconds, exposed, kilobytes, held[name]]
    return result | {"timeline": timeline}


def _medians(rows: list[Any]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True)]


def _take_step(way: Way, mine: Batch) -> tuple[tuple[float, float], dict[str, Any]]:
    """Return the milliseconds of a step, the kilobytes that a rank sent, and a timeline."""
    dist.barrier()
    sent, start = _bytes_on_the_wire(), time.perf_counter()
    with recorded() as log:
        way.step(mine)
    end = time.perf_counter()
    dist.barrier()
    own = (_bytes_on_the_wire() - sent) / 2000  # both ranks send through one interface
    return (1000 * (end - start), own), _timeline(log, start, end)


def _bytes_on_the_wire() -> int:
    """Return the bytes that this machine's processes have sent to each other in this network."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def _timeline(log: Log, start: float, end: float) -> dict[str, Any]:
    """Return what a rank did in a step: when it began and how long it took, in milliseconds."""
    spans = {"waits": log.waits, "sends": [(call.start, call.end) for call in log.calls]}
    return {"step": 1000 * (end - start)} | {
        name: [(1000 * (a - start), 1000 * (b - a)) for a, b in each]
        for name, each in spans.items()
    }


def _draw(ranks: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt  # here, because the ranks need none

    figure, axes = plt.subplots(figsize=(9, 2.2))
    for rank, own in enumerate(ranks):
        axes.broken_barh([(0, own["step"])], (3 * rank, 1), color=COMPUTE)
        axes.broken_barh(own["waits"], (3 * rank, 1), color=WAIT)
        axes.broken_barh(own["sends"], (3 * rank + 1, 1), color=COMMUNICATE, edgecolor="white")
    rows = [f"rank {rank} {what}" for rank in range(len(ranks)) for what in ("computes", "sends")]
    axes.set_yticks([0.5, 1.5, 3.5, 4.5], rows)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds in your step (grey: the rank waits)")
    figure.tight_layout()
    plt.show()


if __name__ == "__main__":
    ranks = run_ranks(measure, int(sys.argv[1]), nproc=2)
    print(json.dumps(ranks[0] | {"timeline": [rank["timeline"] for rank in ranks]}))
