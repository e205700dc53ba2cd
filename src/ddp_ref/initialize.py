"""Open and close the process group, and pick the device."""

import atexit
import os
import time
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from .environment import LaunchInfo, cores_per_rank, detect_launch
from .hostlist import first_host
from .rendezvous import forget, meet

DEFAULT_TIMEOUT = timedelta(minutes=60)
SIDE_TIMEOUT = timedelta(days=365)
SHORTEST = timedelta(milliseconds=1)
TURN = 0.2  # seconds between two looks at gloo's threads: they get a turn, also on busy cores
LINGER = 30.0  # seconds, at most, for them to come to rest
TASKS = Path("/proc/self/task")  # Linux only
_first_host_from_slurm_nodelist = first_host


class DistInfo(NamedTuple):
    """Say which rank this process is, of how many, and on which device it works."""

    distributed: bool
    rank: int
    local_rank: int
    world_size: int
    device: torch.device


@dataclass
class _Opened:
    info: DistInfo
    side: dist.ProcessGroup | None
    pid: int


# What belongs to a default group is forgotten with it, whoever destroys it.
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, _Opened] = weakref.WeakKeyDictionary()


def initialize_ddp(
    timeout: timedelta | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
    backend: str | None = None,
    use_distributed: bool | None = None,
) -> DistInfo:
    """Open the process group this process was launched for, and say which rank it is.

    Collective: all ranks call. A later call returns the same DistInfo. `use_distributed` False is
    one process whatever the environment, True a group or an error, None a group where the launcher
    tells of more than one rank. `rank` and `world_size` come together and win over the environment.
    `timeout` (timedelta, 60 minutes) bounds the opening and every collective. `backend` is "nccl"
    (CUDA), "gloo" (CPU) or None: CUDA where every rank has a GPU of its own, else the CPU.
    Raises ValueError for a contradictory environment or argument, RuntimeError where the ranks do
    not meet or, under "nccl", a rank has no GPU of its own; then no group is left open. TypeError
    for a `timeout` that is no timedelta.
    """
    if backend not in (None, "nccl", "gloo"):
        raise ValueError(f'backend must be "nccl", "gloo" or None, not {backend!r}')
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a timedelta, such as one minute, not {timeout!r}")
    if timeout is not None and not SHORTEST <= timeout <= SIDE_TIMEOUT:
        raise ValueError(f"timeout must be from {SHORTEST} to {SIDE_TIMEOUT}, not {timeout}")
    if not (use_distributed is None or isinstance(use_distributed, bool)):
        raise TypeError(f"use_distributed must be True, False or None, not {use_distributed!r}")
    if use_distributed is not False:
        if dist.is_available() and dist.is_initialized():
            return _current().info
        launch = detect_launch(
            rank=rank, world_size=world_size, master_addr=master_addr, master_port=master_port
        )
        if _wanted(use_distributed, launch):
            return _initialize_distributed(timeout, launch=launch, backend=backend)
    device = torch.device("cpu") if backend == "gloo" else _pick_device(0)
    return DistInfo(False, 0, 0, 1, device)


def cleanup_ddp() -> None:
    """Close the process group and every group made from it; without one, do nothing."""
    if dist.is_available() and dist.is_initialized():
        group = weakref.ref(_default_group())
        dist.destroy_process_group()
        if group():  # a DDP model, or torch itself, holds it: its threads run on
            linger()


def linger() -> None:
    """Wait until gloo's threads have let go of the last tensors, before Python or a model goes.

    For that they need the interpreter lock. While Python ends they would abort the process (up to
    Python 3.13); and to free a model that alone holds the group is to wait for them with the lock.
    """
    deadline = time.monotonic() + LINGER
    before, now = None, _gloo_threads()
    while before != now and time.monotonic() < deadline:
        time.sleep(TURN)
        before, now = now, _gloo_threads()


def _gloo_threads() -> object:
    """Return what changes for as long as a thread that runs collectives has something to do.

    At rest it sleeps, and is not switched; one that waits for the lock is, every 5 ms.
    """
    found = []
    for task in TASKS.glob("*"):
        with suppress(OSError):  # it has just ended
            if (task / "comm").read_text() == "pt_gloo_runloop\n":
                lines = (task / "status").read_text().splitlines()
                found.append([line for line in lines if line.startswith(("State", "volun"))])
    running = any("sleeping" not in state for state, _ in found)
    return time.monotonic() if running else found


def side_group() -> dist.ProcessGroup | None:
    """Return the gloo group of all ranks (timeout 365 days); None where no group is open.

    Under a group that initialize_ddp did not open, the first call makes it: collective then.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    current = _current()
    if current.pid != os.getpid():  # the sockets are its parent's: any call would wait for ever
        raise RuntimeError(
            f"this process was forked from rank {current.info.rank}, perhaps by a DataLoader: "
            "what all ranks call must be called in the ranks themselves"
        )
    if current.side is None:
        dist.barrier()  # new_group has no other bound than its timeout, here a year
        current.side = _new_side_group()
    return current.side


def _should_use_distributed(flag: bool | None) -> bool:
    """Say whether to open a group: never for False, or an error for True where none can be."""
    return flag is not False and _wanted(flag, detect_launch())


def _is_env_distributed() -> bool:
    """Say whether the environment has what a process group needs."""
    return detect_launch().master_addr is not None


def _wanted(flag: bool | None, launch: LaunchInfo) -> bool:
    if flag is None:
        return launch.world_size > 1 and dist.is_available()
    if not dist.is_available():
        raise RuntimeError("use_distributed=True, but this torch is built without distributed")
    if launch.master_addr is None:
        raise RuntimeError(
            f"use_distributed=True, but {launch.reason}, no master to meet at: start with torchrun "
            "or srun, or give rank, world_size, master_addr and master_port"
        )
    return True


def _initialize_distributed(
    timeout: timedelta | None = None,
    *,
    launch: LaunchInfo | None = None,
    backend: str | None = None,
) -> DistInfo:
    """Open the group that `launch`, else the environment, describes; collective."""
    if dist.is_initialized():
        return _current().info
    launch = launch or detect_launch()
    timeout = timeout or DEFAULT_TIMEOUT
    try:
        store, gpus = meet(launch, _gpu_id(_pick_device(launch.local_rank)), timeout)
        device = _agree_on_device(launch, gpus, backend)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
        info = DistInfo(True, launch.rank, launch.local_rank, launch.world_size, device)
        _opened[_default_group()] = _Opened(info, _new_side_group(), os.getpid())
        dist.barrier()
        if not cuda:
            atexit.register(cleanup_ddp)
            if not os.environ.get("OMP_NUM_THREADS"):
                torch.set_num_threads(cores_per_rank(launch))
    except BaseException:
        cleanup_ddp()
        forget(launch)
        raise
    return info


def _gpu_id(device: torch.device) -> str:
    """Return what is unique to a GPU; "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _agree_on_device(launch: LaunchInfo, gpus: list[str], backend: str | None) -> torch.device:
    """Pick CUDA or the CPU, on all ranks alike, from the GPU id of each rank.

    Counting devices would not do: under --gpus-per-task=1 each task sees one, its own.
    """
    found, ranks = len(set(gpus) - {""}), launch.world_size
    if backend == "gloo" or (backend is None and found == 0):
        return torch.device("cpu")
    if found == ranks:
        return _pick_device(launch.local_rank)
    short = f"{found} GPU{'s' if found != 1 else ''} for {ranks} ranks"
    if backend == "nccl":
        raise RuntimeError(
            f'{short}: backend="nccl" needs one for each; start as many ranks as there are GPUs, '
            'or use backend="gloo"'
        )
    if launch.rank == 0:
        warnings.warn(f"{short}: running on the CPU; start {found} to use CUDA", stacklevel=4)
    return torch.device("cpu")


def _pick_device(local_rank: int) -> torch.device:
    """Return this local rank's CUDA device, the CPU where none is visible.

    A task that sees only its own device (Slurm's --gpus-per-task=1) has index 0.
    """
    count = torch.cuda.device_count()
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def _resolve_device(device: torch.device | str) -> torch.device:
    """Return `device` ("gpu" is "cuda") as it is; one that is not there: a warning and the CPU."""
    wanted = torch.device(device.replace("gpu", "cuda") if isinstance(device, str) else device)
    module = getattr(torch, wanted.type, None)  # torch.cuda, torch.mps, torch.xpu, ...
    count = getattr(module, "device_count", lambda: 0)()
    if wanted.type == "cpu" or (wanted.index or 0) < count:
        return wanted
    short = f"{count} {wanted.type} device{'s' if count != 1 else ''}"
    warnings.warn(f"no device {str(device)!r}, there are {short}: using the CPU", stacklevel=2)
    return torch.device("cpu")


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _current() -> _Opened:
    """Return what is known of the default group, also where somebody else opened it."""
    group = _default_group()
    if group not in _opened:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank = _local_rank(rank, world_size)
        device = torch.device("cpu")
        if "nccl" in dist.get_backend_config():
            device = group.bound_device_id or _pick_device(local_rank)
        info = DistInfo(True, rank, local_rank, world_size, device)
        _opened[group] = _Opened(info, None, os.getpid())
    return _opened[group]


def _local_rank(rank: int, world_size: int) -> int:
    """Return what the launcher says of this rank; the rank itself where it tells of another."""
    with suppress(ValueError):  # a part of a set is no error here: the group is open without it
        launch = detect_launch()
        if (launch.rank, launch.world_size) == (rank, world_size):
            return launch.local_rank
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else rank


def _new_side_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=SIDE_TIMEOUT)
