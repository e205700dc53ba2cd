"""Where am I: the launcher's variables, as one small value. Standard library only."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .hostlist import first_host

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MASTER_NAMES = ("MASTER_ADDR", "MASTER_PORT")
SLURM_NAMES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
FIRST_PORT, PORTS = 20_000, 12_007  # all below 32768, where Linux takes ephemeral ports; a prime


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """Say which process of how many this is, who started it, and where the ranks meet.

    The master may be None only where `world_size` is 1.
    """

    launcher: str  # "arguments", "torchrun", "slurm" or "none"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nnodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    reason: str  # one sentence: why this launcher

    def __post_init__(self) -> None:
        for rank, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, rank) < getattr(self, size) <= self.world_size:
                raise ValueError(
                    f"{rank}={getattr(self, rank)} and {size}={getattr(self, size)} with "
                    f"world_size={self.world_size} contradict each other ({self.reason})"
                )


def detect_launch(
    environ: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
) -> LaunchInfo:
    """Find out how this process was launched: by the arguments, torchrun, a Slurm step, or alone.

    The arguments win over `environ` (default: os.environ), a complete set of torchrun's variables
    wins over a Slurm step of several tasks. Where LOCAL_WORLD_SIZE is not set, all ranks are taken
    to be on this host. Raises ValueError for a part of a set, a value that is no integer, or a
    contradiction.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size come together, not {rank=} and {world_size=}")
    environ = {
        name: text for name, text in (os.environ if environ is None else environ).items() if text
    }
    if master_addr is not None and not (isinstance(master_addr, str) and master_addr):
        raise ValueError(f"master_addr must be a host name or address, not {master_addr!r}")
    if master_addr is not None:
        environ["MASTER_ADDR"] = master_addr
    if master_port is not None:
        environ["MASTER_PORT"] = str(master_port)
    if rank is not None:
        environ.setdefault("LOCAL_RANK", str(rank))
        if environ.get("WORLD_SIZE") != str(world_size):  # an outer launch's own: not for this one
            environ.pop("LOCAL_WORLD_SIZE", None)
            environ.pop("GROUP_WORLD_SIZE", None)
        environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        return _complete(environ, "arguments", "rank and world_size were given as arguments")
    if _all_set(environ, RANK_NAMES):
        return _complete(environ, "torchrun", "RANK, LOCAL_RANK and WORLD_SIZE are set")
    if _integer(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _complete(_slurm_step(environ), "slurm", "a task of a Slurm step of several tasks")
    if "SLURM_JOB_ID" in environ:  # an sbatch body or an interactive shell, whatever SLURM_NTASKS
        if "MASTER_ADDR" in environ:  # MASTER_PORT may come alone, for the steps of the job
            _all_set(environ, MASTER_NAMES)
        return LaunchInfo(launcher="none", reason="a Slurm job, but not a step of several tasks")
    _all_set(environ, MASTER_NAMES)
    return LaunchInfo(launcher="none", reason="no launcher's variables are set")


def cores_per_rank(launch: LaunchInfo, environ: Mapping[str, str] | None = None) -> int:
    """Return how many cores are this rank's share of those it may run on; at least 1."""
    share = available_cores() // launch.local_world_size
    if launch.launcher == "slurm":  # may have bound the task to its share: do not divide twice
        environ = os.environ if environ is None else environ
        share = min(available_cores(), _integer(environ, "SLURM_CPUS_PER_TASK", share))
    return max(1, share)


def available_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _complete(environ: Mapping[str, str], launcher: str, reason: str) -> LaunchInfo:
    world_size = _integer(environ, "WORLD_SIZE")
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", world_size)
    _all_set(environ, MASTER_NAMES, required=world_size > 1)
    return LaunchInfo(
        launcher=launcher,
        reason=reason,
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_world_size,
        nnodes=_integer(environ, "GROUP_WORLD_SIZE", -(-world_size // max(1, local_world_size))),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=_port(environ["MASTER_PORT"]) if "MASTER_PORT" in environ else None,
    )


def _slurm_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what Slurm says about a step's task, in torchrun's words."""
    _all_set(environ, SLURM_NAMES, required=True)
    if "MASTER_ADDR" in environ:  # MASTER_PORT may come alone here
        _all_set(environ, MASTER_NAMES)
    tasks = environ["SLURM_STEP_NUM_TASKS"]
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", tasks)
    local_tasks, nodes = _tasks_per_node(counts, _integer(environ, "SLURM_NODEID", 0))
    return {
        "RANK": str(_integer(environ, "SLURM_PROCID")),
        "LOCAL_RANK": str(_integer(environ, "SLURM_LOCALID")),
        "WORLD_SIZE": tasks,
        "LOCAL_WORLD_SIZE": str(local_tasks),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_step_port(environ)),
    }


def _step_port(environ: Mapping[str, str]) -> int:
    """Return a port that all tasks of a step agree on, and no other step of the job has."""
    _all_set(environ, ("SLURM_JOB_ID", "SLURM_STEP_ID"), required=True)
    job, step = _integer(environ, "SLURM_JOB_ID"), _integer(environ, "SLURM_STEP_ID")
    return FIRST_PORT + (97 * job + step) % PORTS  # 97 steps before it meets the next job's


def _tasks_per_node(text: str, node: int) -> tuple[int, int]:
    """Return how many tasks run on the `node`-th node, and how many nodes, of Slurm's `2(x3),1`."""
    nodes, found = 0, 0
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item, re.ASCII)
        if match is None:
            raise ValueError(f"tasks per node must read like 2(x3),1 and not {text!r}")
        first, nodes = nodes, nodes + int(match[2] or 1)
        if first <= node < nodes:
            found = int(match[1])
    if not found:
        raise ValueError(f"SLURM_NODEID={node} has no task in the tasks per node {text!r}")
    return found, nodes


def _all_set(environ: Mapping[str, str], names: Sequence[str], required: bool = False) -> bool:
    """Say whether all variables of a set are there; raise where only a part of it is."""
    missing = [name for name in names if name not in environ]
    if missing and (required or len(missing) < len(names)):
        raise ValueError(
            f"{', '.join(missing)} not set: {', '.join(names)} belong together; torchrun and srun "
            "set them, or pass rank, world_size, master_addr and master_port"
        )
    return not missing


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, str(default))
    if not re.fullmatch(r"\s*-?\d{1,18}\s*", text, re.ASCII):
        raise ValueError(f"{name} must be an integer, not {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,5}\s*", text) or not 0 < int(text) < 2**16:
        raise ValueError(f"MASTER_PORT must be an integer in 1..65535, not {text!r}")
    return int(text)
