"""Find out how this process was launched. Standard library only."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MASTER_NAMES = ("MASTER_ADDR", "MASTER_PORT")
# The number of processes, from Open MPI, from MPICH and Intel MPI, and from MVAPICH.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# srun sets these, and more, for each task of a step.
STEP = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")


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
        environ: The variables to read; empty ones count as not set. Default: `os.environ`.
        rank: This process's rank. Pass it together with `world_size`.
        world_size: The number of processes.
        master_addr: Host name or address of rank 0. Overrides MASTER_ADDR.
        master_port: A free port on that host. Overrides MASTER_PORT.

    Returns:
        The launch. If LOCAL_WORLD_SIZE is not set, all ranks are assumed to be on this host.

    Raises:
        ValueError: If a set of variables is incomplete, a value is not an integer, two values
            contradict each other, or several processes would each run alone, as under mpirun.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"pass rank and world_size together, not {rank=} and {world_size=}")
    if master_addr is not None and not (isinstance(master_addr, str) and master_addr):
        raise ValueError(f"master_addr must be a host name or address, not {master_addr!r}")
    env = {k: v for k, v in (os.environ if environ is None else environ).items() if v}
    master = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
    env |= {name: str(value) for name, value in master.items() if value is not None}
    if rank is not None:
        env = _argument_variables(env, str(rank), str(world_size))
        return _read_launch(env, "arguments", "rank and world_size were given as arguments")
    if _all_set(env, RANK_NAMES):
        return _read_launch(env, "torchrun", "RANK, LOCAL_RANK and WORLD_SIZE are set")
    _refuse_to_run_alone(env)
    if read_int(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _read_launch(_step_variables(env), "slurm", "a Slurm step with several tasks")
    if "SLURM_JOB_ID" not in env or "MASTER_ADDR" in env:
        _all_set(env, MASTER_NAMES)  # an sbatch script may export MASTER_PORT alone
    if "SLURM_JOB_ID" in env:
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
    """Return the number of CPU cores that this process may run on: taskset and Slurm limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm host list such as `rack[1-2]-n[03-05,7]`: rack1-n03.

    `scontrol show hostnames` does the same, but containers often lack it. Raises ValueError if the
    first host cannot be read; the rest of the list is not checked.
    """
    first = re.match(r"(?:[^][,\s]|\[[0-9][-,0-9]*\])+(?=,|$)", nodelist)
    if first is None:
        raise ValueError(f"malformed host list {nodelist!r}: it must read like rack[1-2]-n[03,5-7]")
    # The first host has the first number of every bracket, with its leading zeros.
    return re.sub(r"\[([0-9]+)[^]]*\]", r"\1", first[0])


def read_int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the variable `name` as an integer; ValueError, with its text, if it is not one."""
    text = env.get(name) or str(default)  # an empty variable counts as not set
    if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
        raise ValueError(f"{name} must be an integer, not {text!r}")
    return int(text)


def _all_set(env: Mapping[str, str], names: tuple[str, ...], required: bool = False) -> bool:
    """Return whether all variables of a set are there.

    Raises ValueError if only some of them are, or if the set is `required` and not complete.
    """
    missing = [name for name in names if name not in env]
    if missing and (required or len(missing) < len(names)):
        raise ValueError(
            f"{', '.join(missing)} not set: {', '.join(names)} belong together; set or unset all "
            "(torchrun and srun set their own), or pass rank, world_size, master_addr, master_port"
        )
    return not missing


def _refuse_to_run_alone(env: Mapping[str, str]) -> None:
    """Raise ValueError if this is one of several processes that would each run alone."""
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    # srun sets PMI_SIZE to its number of tasks. With another number, mpirun runs inside the step.
    seen = [f"{name}={env[name]}" for name in MPI_SIZES if env.get(name, "1") not in ("1", tasks)]
    if tasks == "1" and read_int(env, "SLURM_PROCID", 0) > 0:
        seen.append(f"SLURM_PROCID={env['SLURM_PROCID']}")
    if seen:
        raise ValueError(
            f"{', '.join(seen)}: one of several processes, but neither torchrun's variables nor a "
            "matching Slurm step say which rank it is; start with torchrun or srun, pass rank, "
            "world_size, master_addr and master_port, or pass use_distributed=False to run alone"
        )


def _argument_variables(env: dict[str, str], rank: str, world_size: str) -> dict[str, str]:
    """Return torchrun's variables for the rank and the world size that the caller passed."""
    # With another number of ranks, torchrun's variables describe an outer launch, not this one.
    if env.get("WORLD_SIZE", world_size) != world_size:
        env = {name: env[name] for name in env if name.startswith(("MASTER_", "SLURM_"))}
    if (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS")) == (rank, world_size):
        env = _step_variables(env) | env  # the arguments describe this task of the step
    return {"LOCAL_RANK": rank} | env | {"RANK": rank, "WORLD_SIZE": world_size}


def _step_variables(env: dict[str, str]) -> dict[str, str]:
    """Add torchrun's variables, translated from those of one task of an `srun` step."""
    _all_set(env, STEP, required=True)
    tasks = env["SLURM_STEP_NUM_TASKS"]
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", tasks)
    # Slurm writes 2(x3),1 for three nodes with two tasks each and one node with one task.
    listed = re.sub(r"([0-9]+)\(x([0-9]{1,5})\)", lambda m: ",".join([m[1]] * int(m[2])), text)
    counts, node = listed.split(","), read_int(env, "SLURM_NODEID", 0)
    if not (0 <= node < len(counts) and counts[node].isdecimal()):
        raise ValueError(f"SLURM_NODEID={node} has no tasks in {text!r}: let srun set both")
    # All tasks of a step compute the same port, and the job's next steps compute other ports. Linux
    # picks ephemeral ports from 32768 upward.
    port = 20_000 + (97 * read_int(env, "SLURM_JOB_ID") + read_int(env, "SLURM_STEP_ID")) % 12_007
    if "MASTER_ADDR" not in env:
        master = {"MASTER_ADDR": first_host(env["SLURM_STEP_NODELIST"]), "MASTER_PORT": str(port)}
        env = master | env
    return env | {
        "RANK": str(read_int(env, "SLURM_PROCID")),
        "LOCAL_RANK": str(read_int(env, "SLURM_LOCALID")),
        "WORLD_SIZE": tasks,
        "LOCAL_WORLD_SIZE": counts[node],
        "GROUP_WORLD_SIZE": str(len(counts)),
    }


def _read_launch(env: Mapping[str, str], launcher: str, reason: str) -> LaunchInfo:
    """Read a launch from torchrun's variables."""
    world_size = read_int(env, "WORLD_SIZE")
    local_world_size = read_int(env, "LOCAL_WORLD_SIZE", world_size)
    _all_set(env, MASTER_NAMES, required=world_size > 1)
    port = read_int(env, "MASTER_PORT") if "MASTER_PORT" in env else None
    if port is not None and not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT must be from 1 to 65535, not {port}")
    launch = LaunchInfo(
        launcher=launcher,
        reason=reason,
        rank=read_int(env, "RANK"),
        local_rank=read_int(env, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_world_size,
        nnodes=read_int(env, "GROUP_WORLD_SIZE", -(-world_size // max(1, local_world_size))),
        master_addr=env.get("MASTER_ADDR"),
        master_port=port,
    )
    for rank, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
        if not 0 <= getattr(launch, rank) < getattr(launch, size) <= world_size:
            raise ValueError(f"{rank} and {size} clash in {launch}: let the launcher set them")
    return launch
