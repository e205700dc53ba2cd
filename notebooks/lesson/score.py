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
from .cost_model import fit_link
from .palette import COMMUNICATE, COMPUTE, WAIT
from .prediction import time_all_reduces
from .record import Log, recorded
from .trial import WEIGHTS, Way, batch, bytes_held, loss_of, new_gpt

MEGABITS = 200  # a second, shared by both ranks
ROWS, STEPS, WARM_UP = 32, 12, 3  # of a rank's batch; steps
SIZES = [2**k for k in range(12, 20)]  # bytes of the all-reduces that measure the network
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
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.splitlines()[-1:] or [f"exit code {done.returncode}"]
        print(f"not measured, because no slowed network can be made here: {why[0]}")
        return
    measured = json.loads(done.stdout.splitlines()[-1])
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table[str(stage)] = {name: measured[name] for name in ("predicted", "yours", "PyTorch's")}
    TABLE.write_text(json.dumps(table, indent=1))
    print(_as_text(table))
    _draw(measured["timeline"])


def _as_text(table: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = ["stage            |  ms a step | ms exposed | KB sent | bytes per weight"]
    for stage, ways in sorted(table.items()):
        for name, row in ways.items():
            cells = [f"{row[key]:10.1f}" if key in row else 10 * " " for key in COLUMNS]
            lines.append(f"{stage} {name:14} | " + " | ".join(cells))
    return "\n".join(lines)


COLUMNS = ("ms", "exposed", "kilobytes", "held")


def measure(stage: int) -> dict[str, Any]:
    """Take the steps of both ways in turn, and return what they cost (collective)."""
    module, own = import_module(f"exercises.stage_{stage}"), myddp.load()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link = fit_link(time_all_reduces(SIZES), dist.get_world_size())
    forward, backward = _time_alone()
    compute, exposed, sent = module.predict(forward, backward, link)
    predicted = {"ms": 1000 * (compute + exposed), "exposed": 1000 * exposed}
    measured: dict[str, Any] = {"predicted": predicted | {"kilobytes": sent / 1000}}
    for name, make in {"PyTorch's": module.torchs_way, "yours": lambda: module.way(own)}.items():
        before = bytes_held()
        measured[name], log, span = _take_steps(way := make(), compute)
        measured[name]["held"] = (bytes_held() - before) / WEIGHTS
        del way
    measured["timeline"] = _timeline(log, span)
    dist.destroy_process_group()
    return measured


def _time_alone() -> tuple[float, float]:
    """Return the seconds of forward with the optimizer's step, and of backward, without sending."""
    model, times = new_gpt(), []
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        loss = loss_of(model, batch(step, ROWS))
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        times.append((middle - start + time.perf_counter() - end, end - middle))
    forward, backward = (statistics.median(part) for part in zip(*times[WARM_UP:], strict=True))
    return forward, backward


def _take_steps(way: Way, compute: float) -> tuple[dict[str, float], Log, tuple[float, float]]:
    rows = []
    for step in range(STEPS):
        mine = batch(step, ROWS)
        dist.barrier()
        sent, start = _bytes_on_the_wire(), time.perf_counter()
        with recorded() as log:
            way.step(mine)
        end = time.perf_counter()
        dist.barrier()
        exposed = end - start - compute
        # Both ranks send through one interface.
        rows.append((1000 * (end - start), 1000 * exposed, (_bytes_on_the_wire() - sent) / 2000))
    middle = [statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True)]
    return dict(zip(COLUMNS, middle, strict=False)), log, (start, end)


def _bytes_on_the_wire() -> int:
    """Return the bytes that this machine's processes have sent to each other in this network."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def _timeline(log: Log, span: tuple[float, float]) -> dict[str, Any]:
    """Return what a rank did in its last step, in milliseconds since the step began."""

    def since_start(spans: Any) -> list[tuple[float, float]]:
        return [(1000 * (a - span[0]), 1000 * (b - a)) for a, b in spans]

    return {
        "step": 1000 * (span[1] - span[0]),
        "waits": since_start(log.waits),
        "sends": since_start((call.start, call.end) for call in log.calls),
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
    axes.set_xlabel("milliseconds in your step (grey: the rank waits)")
    figure.tight_layout()
    plt.show()


if __name__ == "__main__":
    ranks = run_ranks(measure, int(sys.argv[1]), nproc=2)
    print(json.dumps(ranks[0] | {"timeline": [rank["timeline"] for rank in ranks]}))
