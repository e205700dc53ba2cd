"""Open and close the process group, and choose the device."""

from __future__ import annotations  # a torch that was built without distributed has no Store

import atexit
import os
import socket
import time
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .environment import LaunchInfo, cores_per_rank, detect_launch
from .rendezvous import GRACE, Rendezvous, RendezvousError, refuse_unsafe_restarts, start_thread
from .slurm import first_host as _first_host_from_slurm_nodelist  # noqa: F401

DEFAULT_TIMEOUT = timedelta(minutes=60)


class DistInfo(NamedTuple):
    """Which rank this process is, out of how many, and on which device it works.

    Attributes:
        distributed: Whether a process group is open.
        rank: This process's number among all ranks, from 0.
        local_rank: Its number among the ranks of its node, from 0.
        world_size: How many ranks there are; 1 without a group.
        device: The device of this rank: a GPU of its own, or the CPU.
    """

    distributed: bool
    rank: int
    local_rank: int
    world_size: int
    device: torch.device


@dataclass
class OpenGroup:
    """What this module records about the default process group while it is open."""

    info: DistInfo
    store: Any  # a dist.Store
    side: Any = None  # a gloo group of all ranks, for on_rank's messages, once it is open
    nodes: list[str] = field(default_factory=list)  # by rank
    calls: list[int] = field(default_factory=lambda: [0, 0])  # on_rank calls: global, local


# Weak keys: if somebody else destroys the group, our entry goes with it.
_groups: weakref.WeakKeyDictionary[Any, OpenGroup] = weakref.WeakKeyDictionary()
# The group that this process had when it was forked: its sockets belong to the rank.
_forked: list[Any] = []
if dist.is_available() and hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=lambda: _forked.append(dist.group.WORLD))


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
    """Open the process group that this process was launched for (collective: all ranks call).

    It also prepares the process. A GPU rank's GPU becomes the current CUDA device. A CPU rank gets
    its share of the cores as torch's number of threads, unless OMP_NUM_THREADS is set. The group is
    closed at exit. If a group is already open, a call returns the DistInfo of that group, whatever
    the other arguments say, unless `use_distributed` is False. If this raises, restart all ranks,
    because a rank that retries alone only waits for the others until its timeout.

    Args:
        timeout: Limits this call and every collective. Default: 60 minutes. A shorter timeout
            reports a frozen rank sooner, but it must be longer than your slowest rank can be late.
        rank: This process's rank. Pass it with `world_size`; both override the environment.
        world_size: The number of processes.
        master_addr: Host name or address of rank 0. Overrides MASTER_ADDR.
        master_port: A free port on that host. Overrides MASTER_PORT.
        backend: "nccl" (CUDA) or "gloo" (CPU). Default: CUDA if every rank has a GPU of its own,
            otherwise the CPU, with one line that says why.
        use_distributed: False runs as a single process whatever the environment says. True opens
            a group or fails. None opens a group if the launcher started more than one rank.

    Returns:
        This process's rank, local rank, world size and device. Without a group, the device is the
        current CUDA device if there is one.

    Raises:
        ValueError: If the environment or the arguments contradict each other.
        TypeError: If `timeout` is not a timedelta or `use_distributed` is not a bool.
        RuntimeError: If ranks are missing, naming them (but not a rank that stops in the very last
            step, which torch does not name); if the master cannot be reached; if
            `backend="nccl"` and a rank has no GPU of its own; or if a restart by torchrun would
            not be safe. No group is left open.
    """
    if backend not in (None, "nccl", "gloo"):
        raise ValueError(f'backend must be "nccl", "gloo" or None, not {backend!r}')
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a timedelta, such as one minute, not {timeout!r}")
    if timeout is not None and not timedelta(milliseconds=1) <= timeout <= timedelta(days=365):
        raise ValueError(f"timeout must be from a millisecond to 365 days, not {timeout}")
    if not (use_distributed is None or isinstance(use_distributed, bool)):
        raise TypeError(f"use_distributed must be True, False or None, not {use_distributed!r}")
    if use_distributed is not False:
        if dist.is_available() and dist.is_initialized():
            return known_group().info
        launch = detect_launch(
            rank=rank, world_size=world_size, master_addr=master_addr, master_port=master_port
        )
        if _should_open_group(use_distributed, launch):
            return _join_launch(launch, timeout or DEFAULT_TIMEOUT, backend)
    device = torch.device("cpu") if backend == "gloo" else _current_device(0)
    return DistInfo(False, 0, 0, 1, device)


def cleanup_ddp() -> None:
    """Close the process group, if one is open, and every group made from it.

    All ranks call it once none of them needs the others any more. It may wait 30 seconds. A process
    that was forked from a rank leaves the group to the rank, and must end with `os._exit`, as those
    of multiprocessing do.
    """
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD not in _forked:
        dist.destroy_process_group()
    wait_until_gloo_is_idle()  # a DDP model, or torch itself, may still hold a closed group


def wait_until_gloo_is_idle() -> None:
    """Wait until gloo's threads sleep and are not scheduled between two checks, 30 s at most.

    These threads are visible only on Linux. Elsewhere, this returns at once.

    These threads take the GIL to release the last tensors. If Python is shutting down by then, the
    process aborts (up to Python 3.13). Freeing the last DDP model joins gloo's threads while
    holding the GIL that they need.
    """
    before, deadline = "", time.monotonic() + 30
    while (now := _gloo_activity()) != before and time.monotonic() < deadline:
        before = now
        time.sleep(0.2)


def open_group() -> OpenGroup | None:
    """Return the open group with its side group, or None without a process group.

    If other code opened the group, the first call creates the side group, so all ranks call.

    Raises:
        RuntimeError: If this process was forked from a rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.group.WORLD in _forked:  # any call would hang
        raise RuntimeError(
            f"a fork of rank {dist.get_rank()} cannot use its process group: call this in the rank"
        )
    group = known_group()
    if group.side is None:
        atexit.register(wait_until_gloo_is_idle)
        # This has the group's own timeout; new_group would wait for 30 minutes.
        wait_for_all_ranks(group.info.device)
        side, nodes = dist.new_group(backend="gloo"), [""] * group.info.world_size
        dist.all_gather_object(nodes, _node(), group=side)
        group.side, group.nodes = side, nodes  # both at once, and only if nothing has failed
    return group


def known_group() -> OpenGroup:
    """Return the record of the default group; make it if other code opened the group."""
    default: Any = dist.group.WORLD
    if default not in _groups:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank = _local_rank(rank, world_size)
        own = default.bound_device_id or _current_device(local_rank)
        device = own if "nccl" in dist.get_backend_config() else torch.device("cpu")
        info = DistInfo(True, rank, local_rank, world_size, device)
        _groups[default] = OpenGroup(info, dist.distributed_c10d._get_default_store())
    return _groups[default]


def wait_for_all_ranks(device: torch.device) -> None:
    """Wait until all ranks have called. Without `device_ids`, nccl would guess this rank's GPU."""
    dist.barrier(device_ids=None if device.index is None else [device.index])


def _should_use_distributed(flag: bool | None) -> bool:
    """Return whether to open a group; raise if `flag` is True and there is no launch to join."""
    return flag is not False and _should_open_group(flag, detect_launch())


def _is_env_distributed() -> bool:
    """Return whether the environment has what a process group needs."""
    return detect_launch().master_addr is not None


def _initialize_distributed(timeout: timedelta | None = None) -> DistInfo:
    """Open the group that the environment describes, or fail (collective)."""
    return initialize_ddp(timeout, use_distributed=True)


def _should_open_group(flag: bool | None, launch: LaunchInfo) -> bool:
    if flag is None and launch.world_size == 1:
        return False
    if not dist.is_available():
        raise RuntimeError("this torch is built without torch.distributed: use another build")
    if launch.master_addr is None:
        raise RuntimeError(
            f"use_distributed=True, but this launch has no master address ({launch.reason}): start "
            "with torchrun or srun, or pass rank, world_size, master_addr and master_port"
        )
    return True


def _join_launch(launch: LaunchInfo, timeout: timedelta, backend: str | None) -> DistInfo:
    """Open the group that `launch` describes, and prepare this process for its device."""
    refuse_unsafe_restarts(launch)
    atexit.register(wait_until_gloo_is_idle)  # atexit calls the last first, so this after cleanup
    gpu = "" if backend == "gloo" else _gpu_id(_pick_device(launch.local_rank))
    rendezvous = Rendezvous(launch, timeout)
    try:
        reports = rendezvous.run("arrive", lambda: rendezvous.exchange((_node(), gpu)))
        nodes, gpus = map(list, zip(*reports, strict=True))
        device = _agree_on_device(launch, gpus, backend)
        side = rendezvous.run("open the group", lambda: _open_groups(rendezvous, device))
        if device.type == "cuda":
            torch.cuda.set_device(device)
            _clean_up_at_exit(device)
        else:
            atexit.register(cleanup_ddp)
            if not os.environ.get("OMP_NUM_THREADS"):
                torch.set_num_threads(cores_per_rank(launch))
    except BaseException:
        rendezvous.give_up()
        # At exit, wait for a thread that is still in C++: if it returns later, the process aborts.
        # And the store ends with this process, so let the other ranks read what is in it.
        atexit.register(time.sleep, GRACE)
        start_thread(cleanup_ddp).join(1)  # nccl may wait for the other ranks there
        raise
    info = DistInfo(True, launch.rank, launch.local_rank, launch.world_size, device)
    _groups[dist.group.WORLD] = OpenGroup(info, rendezvous.store, side, nodes)
    return info


def _open_groups(rendezvous: Rendezvous, device: torch.device) -> dist.ProcessGroup:
    """Open the default group and return its side group, once all ranks have opened theirs."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)  # in a new thread, the current device is cuda:0
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=rendezvous.store,
        rank=rendezvous.launch.rank,
        world_size=rendezvous.launch.world_size,
        timeout=rendezvous.timeout,
        device_id=device if cuda else None,
    )
    if rendezvous.given_up.is_set():  # a peer woke up after the main thread had raised
        dist.destroy_process_group()
        raise RendezvousError("the main thread has raised")
    side: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=rendezvous.timeout)
    rendezvous.exchange(None)
    # Rank 0 hosts the store, so it must not go on before the others have read what is in it.
    dist.barrier(side)
    return side


def _clean_up_at_exit(device: torch.device) -> None:
    """Close the group at exit, but give up after 10 s: nccl may be waiting for other ranks.

    Python 3.12 cannot start a thread at exit, so the closing thread starts now, and waits.
    """
    exiting = Event()

    def close() -> None:
        exiting.wait()
        torch.cuda.set_device(device)
        cleanup_ddp()

    atexit.register(start_thread(close).join, 10)  # atexit calls these in reverse
    atexit.register(exiting.set)


def _node() -> str:
    """Return a name for this node; torchrun and Slurm may run several nodes on one host."""
    return f"{_host_id()} {os.environ.get('GROUP_RANK') or os.environ.get('SLURM_NODEID', '')}"


def _host_id() -> str:
    """Return an id that is unique to this host; two containers may have the same host name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else socket.gethostname()


def _gpu_id(device: torch.device) -> str:
    """Return "uuid host/PCI address" of a GPU, "" for the CPU.

    The slices of a partitioned (MIG) card differ in their UUID but share their PCI address, and
    NCCL refuses two ranks with the same address.
    """
    if device.type != "cuda":
        return ""
    card = torch.cuda.get_device_properties(device)
    # A torch that does not know the address compares the UUIDs.
    address = [getattr(card, f"pci_{part}_id", card.uuid) for part in ("domain", "bus", "device")]
    return f"{card.uuid} {_host_id()}/{':'.join(map(str, address))}"


def _agree_on_device(launch: LaunchInfo, gpus: list[str], backend: str | None) -> torch.device:
    """Choose CUDA or the CPU from the GPU ids of all ranks, so that all ranks choose alike.

    Counting devices is not enough: under --gpus-per-task=1 a task sees only its own GPU.
    """
    seen = {gpu for gpu in gpus if gpu}
    cards = len({gpu.split(" ")[-1] for gpu in seen})
    if backend == "gloo" or (backend is None and not seen):
        return torch.device("cpu")
    if cards == launch.world_size:
        return _pick_device(launch.local_rank)
    problem = f"{cards} GPU{'s' if cards != 1 else ''} for {launch.world_size} ranks"
    if len(seen) > cards:
        problem += f" ({len(seen)} MIG slices of the same cards, which NCCL cannot use together)"
    if backend == "nccl":
        raise RuntimeError(f'{problem}: nccl needs one per rank; start fewer ranks or use "gloo"')
    if launch.rank == 0:
        warnings.warn(f"{problem}: running on the CPU; start one rank per GPU", stacklevel=4)
    return torch.device("cpu")


def _pick_device(local_rank: int) -> torch.device:
    """Return this local rank's CUDA device, or the CPU if none is visible.

    A task that sees only its own device (Slurm's --gpus-per-task=1) has index 0.
    """
    count = torch.cuda.device_count()
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def _current_device(local_rank: int) -> torch.device:
    """Return the GPU that the user has made current, otherwise this local rank's device.

    That cuda:0 is current says nothing: it is unless the user calls torch.cuda.set_device.
    """
    cuda: Any = torch.cuda
    index = cuda.current_device() if cuda.is_initialized() else 0
    return torch.device("cuda", index) if index else _pick_device(local_rank)


def _resolve_device(device: torch.device | str) -> torch.device:
    """Return `device` ("gpu" means "cuda"), or the CPU with a warning if it is not there."""
    wanted = torch.device(device.replace("gpu", "cuda") if isinstance(device, str) else device)
    count = 0
    with suppress(RuntimeError):  # torch has no module for this type
        count = torch.get_device_module(wanted).device_count()
    if (wanted.index or 0) < count:
        return wanted
    warnings.warn(f"no {device} ({wanted.type} devices: {count}): using the CPU", stacklevel=2)
    return torch.device("cpu")


def _local_rank(rank: int, world_size: int) -> int:
    """Return the launcher's local rank if the launcher describes this group, otherwise the rank."""
    with suppress(ValueError):  # the group is open, so an incomplete environment is no error here
        launch = detect_launch()
        if (launch.rank, launch.world_size) == (rank, world_size):
            return launch.local_rank
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else rank


def _gloo_activity() -> str:
    """Return a text that changes while any of gloo's threads is active; "" without such threads."""
    activity = ""
    for task in Path("/proc/self/task").glob("*"):  # Linux only; empty elsewhere
        with suppress(OSError):  # the thread has just ended
            status = (task / "status").read_text()
            if status.startswith("Name:\tpt_gloo_runloop\n"):
                asleep = "sleeping" in status
                activity += status.partition("voluntary_")[2] if asleep else str(time.monotonic())
    return activity
