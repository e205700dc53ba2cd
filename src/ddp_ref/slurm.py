"""Translate what Slurm tells one task of an `srun` step into torchrun's variables.

Standard library only.
"""

import re
from collections.abc import Mapping, Sequence

MASTER_NAMES = ("MASTER_ADDR", "MASTER_PORT")
# Linux picks ephemeral ports from 32768 upward, so all of ours stay below. 12007 is a prime.
FIRST_PORT, PORT_COUNT = 20_000, 12_007

_RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
# A host is a plain name, or pieces that each end with a bracket: rack[1-2]-n[03-05,7].
_HOST = rf"(?:(?:[^][,\s]*\[{_RANGE}(?:,{_RANGE})*\])+|[^][,\s]+)"
_HOST_LIST = re.compile(rf"[, \t\n]*({_HOST})(?:[, \t\n]+{_HOST})*[, \t\n]*")


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm host list such as `rack[1-2]-n[03-05,7]`: rack1-n03.

    No other name is built, so a range of a million hosts costs nothing.

    Args:
        nodelist: What Slurm writes into SLURM_STEP_NODELIST.

    Returns:
        The first name that `scontrol show hostnames` would print.

    Raises:
        ValueError: If the text is not a host list. The message quotes the text, not the place.
    """
    match = _HOST_LIST.fullmatch(nodelist)
    brackets = ",".join(re.findall(r"\[([^][]*)\]", nodelist))
    ranges = re.findall(r"([0-9]+)-([0-9]+)", brackets)
    if match is None or any(int(low) > int(high) for low, high in ranges):
        raise ValueError(f"malformed host list {nodelist!r}: it must read like rack[1-2]-n[03,5-7]")
    # The first host has the first number of every bracket, with its leading zeros.
    return re.sub(r"\[([0-9]+)[^]]*\]", r"\1", match[1])


def step_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Translate the variables of one Slurm task into the names that torchrun would have set.

    Args:
        environ: The environment of a task in a step with more than one task.

    Returns:
        RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE (the number of nodes),
        MASTER_ADDR and MASTER_PORT. A master that the user has set is kept.

    Raises:
        ValueError: If a variable is missing or is not what Slurm writes.
    """
    all_set(environ, ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"), required=True)
    if "MASTER_ADDR" in environ:  # MASTER_PORT alone is fine: Slurm names the host
        all_set(environ, MASTER_NAMES)
    tasks = environ["SLURM_STEP_NUM_TASKS"]
    local_tasks, nodes = _tasks_per_node(environ)
    return {
        "RANK": str(read_int(environ, "SLURM_PROCID")),
        "LOCAL_RANK": str(read_int(environ, "SLURM_LOCALID")),
        "WORLD_SIZE": tasks,
        "LOCAL_WORLD_SIZE": str(local_tasks),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_step_port(environ)),
    }


def _step_port(environ: Mapping[str, str]) -> int:
    """Return a port that all tasks of a step compute alike and no other step of the job uses."""
    all_set(environ, ("SLURM_JOB_ID", "SLURM_STEP_ID"), required=True)
    job, step = read_int(environ, "SLURM_JOB_ID"), read_int(environ, "SLURM_STEP_ID")
    return FIRST_PORT + (97 * job + step) % PORT_COUNT  # 97 steps fit before the next job's ports


def _tasks_per_node(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the tasks on this node, and the number of nodes, from Slurm's `2(x3),1`."""
    of_step = "SLURM_STEP_TASKS_PER_NODE" in environ
    name = "SLURM_STEP_TASKS_PER_NODE" if of_step else "SLURM_TASKS_PER_NODE"
    counts = environ.get(name, environ["SLURM_STEP_NUM_TASKS"])
    node = read_int(environ, "SLURM_NODEID", 0)
    tasks = nodes = 0
    for item in counts.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item)
        if match is None:
            raise ValueError(f"{name} must be like 2(x3),1, not {counts!r}: unset it")
        alike = int(match[2] or 1)  # so many nodes in a row have this number of tasks
        if nodes <= node < nodes + alike:
            tasks = int(match[1])
        nodes += alike
    if not tasks:
        raise ValueError(f"SLURM_NODEID={node} has no tasks in {counts!r}: let srun set both")
    return tasks, nodes


def all_set(environ: Mapping[str, str], names: Sequence[str], required: bool = False) -> bool:
    """Return whether all variables of a set are there.

    Args:
        environ: The variables.
        names: The names of the set.
        required: Whether an empty set is an error, too.

    Raises:
        ValueError: If some are missing and others are not, or if they are required.
    """
    missing = [name for name in names if name not in environ]
    if missing and (required or len(missing) < len(names)):
        raise ValueError(
            f"{', '.join(missing)} not set: {', '.join(names)} belong together; unset all and "
            "let torchrun or srun set them, or set all, or pass rank, world_size, master_addr and "
            "master_port"
        )
    return not missing


def read_int(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the variable `name` as an integer; ValueError, with its text, if it is not one."""
    text = environ.get(name) or str(default)  # an empty variable counts as not set
    if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
        raise ValueError(f"{name} must be an integer, not {text!r}")
    return int(text)
