"""Read the launcher's variables into one small value, LaunchInfo. Standard library only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .slurm import MASTER_NAMES, all_set, read_int, step_variables

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """Which rank this process is, out of how many, who started it, and where the ranks meet.

    Attributes:
        launcher: "arguments", "torchrun", "slurm" or "none".
        rank: This process's number among all ranks, from 0.
        local_rank: Its number among the ranks of its node, from 0.
        world_size: How many ranks there are.
        local_world_size: How many of them are on this node.
        nnodes: How many nodes they are on.
        master_addr: Host name or address of rank 0. None only if `world_size` is 1.
        master_port: The port on that host. None only if `world_size` is 1.
        reason: Why we think it was this launcher. Error messages quote it.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nnodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    reason: str

    def __post_init__(self) -> None:
        for rank, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, rank) < getattr(self, size) <= self.world_size:
                raise ValueError(
                    f"{rank}={getattr(self, rank)} and {size}={getattr(self, size)} with "
                    f"world_size={self.world_size} clash ({self.reason}): let the launcher set them"
                )


def detect_launch(
    environ: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
) -> LaunchInfo:
    """Find out how this process was launched: by arguments, torchrun, a Slurm step, or alone.

    Arguments override variables, and a complete set of torchrun's variables overrides Slurm's. An
    sbatch body and an interactive shell have SLURM_NTASKS > 1 too, but nobody started their other
    tasks, so only a step with several tasks counts as a distributed launch. If `rank` and
    `world_size` are those of this task of a Slurm step, the step's variables supply the rest.

    Args:
        environ: The variables to read. Default: `os.environ`, at the time of the call.
        rank: This process's rank. Pass it together with `world_size`.
        world_size: The number of processes.
        master_addr: Host name or address of rank 0. Overrides MASTER_ADDR.
        master_port: A free port on that host. Overrides MASTER_PORT.

    Returns:
        The launch. If LOCAL_WORLD_SIZE is not set, all ranks are assumed to be on this host.

    Raises:
        ValueError: If a set of variables is incomplete, a value is not an integer, or two values
            contradict each other.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"pass rank and world_size together, not {rank=} and {world_size=}")
    if master_addr is not None and not (isinstance(master_addr, str) and master_addr):
        raise ValueError(f"master_addr must be a host name or address, not {master_addr!r}")
    # A variable that is empty counts as not set.
    environ = {k: v for k, v in (os.environ if environ is None else environ).items() if v}
    master = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
    environ |= {name: str(value) for name, value in master.items() if value is not None}
    if rank is not None:
        if environ.get("WORLD_SIZE", str(world_size)) != str(world_size):
            # They describe an outer launch with another number of ranks, not this one.
            for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
                environ.pop(name, None)
        step = environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS")
        if step == (str(rank), str(world_size)):  # the arguments describe this task of the step
            environ = step_variables(environ) | environ
        environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        environ.setdefault("LOCAL_RANK", str(rank))
        return _complete(environ, "arguments", "rank and world_size were given as arguments")
    if all_set(environ, RANK_NAMES):
        return _complete(environ, "torchrun", "RANK, LOCAL_RANK and WORLD_SIZE are set")
    if read_int(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _complete(step_variables(environ), "slurm", "a Slurm step with several tasks")
    if "SLURM_JOB_ID" not in environ or "MASTER_ADDR" in environ:
        all_set(environ, MASTER_NAMES)  # in a job, MASTER_PORT may come alone, for its steps
    if "SLURM_JOB_ID" in environ:
        return LaunchInfo(launcher="none", reason="a Slurm job, but not a step of several tasks")
    return LaunchInfo(launcher="none", reason="no launcher's variables are set")


def cores_per_rank(launch: LaunchInfo) -> int:
    """Return this rank's share of the CPU cores that the process may run on; at least 1."""
    share = available_cores() // launch.local_world_size
    if launch.launcher == "slurm":
        # Slurm may already have bound the task to its share, so do not divide a second time.
        share = min(available_cores(), read_int(os.environ, "SLURM_CPUS_PER_TASK", share))
    return max(1, share)


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # Linux: respects taskset and Slurm's binding
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _complete(environ: Mapping[str, str], launcher: str, reason: str) -> LaunchInfo:
    world_size = read_int(environ, "WORLD_SIZE")
    local_world_size = read_int(environ, "LOCAL_WORLD_SIZE", world_size)
    all_set(environ, MASTER_NAMES, required=world_size > 1)
    port = read_int(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
    if port is not None and not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT must be from 1 to 65535, not {port}")
    return LaunchInfo(
        launcher=launcher,
        reason=reason,
        rank=read_int(environ, "RANK"),
        local_rank=read_int(environ, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_world_size,
        nnodes=read_int(environ, "GROUP_WORLD_SIZE", -(-world_size // max(1, local_world_size))),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=port,
    )
