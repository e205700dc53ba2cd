"""What this machine and this launch can run: one line a check, with the way out of a problem."""

import ipaddress
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from .environment import LaunchInfo, detect_launch
from .initialize import cleanup_ddp, initialize_ddp
from .launch import run_ranks
from .rendezvous import serves

ALL_REDUCE_MIB = 25  # DDP's default bucket_cap_mb
ROUNDS = 5
LIMIT = timedelta(seconds=90)


class Finding(NamedTuple):
    """One line of the report; `level` is "ok", "warning" or "problem"."""

    level: str
    check: str
    text: str
    way_out: str = ""


def doctor(as_json: bool = False) -> int:
    """Print what each check finds, as it is found; return 1 if there is a problem, else 0."""
    findings = []
    for finding in find():
        findings.append(finding)
        if not as_json:
            way_out = f" -> {finding.way_out}" if finding.way_out else ""
            print(f"{finding.level:<8} {finding.check:<9} {finding.text}{way_out}", flush=True)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    return int(any(finding.level == "problem" for finding in findings))


def find() -> Iterator[Finding]:
    """Yield the findings in the order in which one problem hides the next."""
    yield _platform()
    try:
        launch = detect_launch()
    except ValueError as error:
        yield Finding("problem", "launch", str(error), "unset what the launcher did not set")
        launch = LaunchInfo(launcher="none", reason="the environment contradicts itself")
    else:
        yield _launch(launch)
    if not dist.is_available():
        yield Finding("problem", "backends", "this torch has no torch.distributed", "another build")
        return
    yield _backends()
    for check in (_devices, _master, _port, _interface):
        yield _found(check, launch)
    yield from _all_reduces()
    yield _found(_write)


def _found(check: Callable[..., Finding], *args: LaunchInfo) -> Finding:
    """Return what `check` finds; one that fails must not hide the rest of the report."""
    try:
        return check(*args)
    except Exception as error:  # noqa: BLE001 - whatever keeps a check from its end is the finding
        text = f"the check failed: {type(error).__name__}: {error}".splitlines()[0]
        return Finding("problem", check.__name__.strip("_"), text, "report it as a bug")


def _platform() -> Finding:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    text = (
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__} ({cuda}), {torch.get_num_threads()} threads"
    )
    if sys.platform == "win32":
        return Finding("problem", "platform", text, "use WSL2")
    if sys.platform != "linux":
        return Finding("warning", "platform", text, "tested on Linux only")
    return Finding("ok", "platform", text)


def _launch(launch: LaunchInfo) -> Finding:
    text = (
        f"{launch.launcher}: rank {launch.rank} of {launch.world_size}, local rank "
        f"{launch.local_rank} of {launch.local_world_size}, {launch.nnodes} node"
        f"{'s' * (launch.nnodes > 1)} ({launch.reason})"
    )
    if launch.launcher == "none" and os.environ.get("SLURM_NTASKS", "1") != "1":
        way_out = "start the ranks with srun, or with torchrun"
        return Finding("warning", "launch", f"{text}; SLURM_NTASKS alone starts nothing", way_out)
    return Finding("ok", "launch", text)


def _backends() -> Finding:
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    text = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in found.items())
    if not found["gloo"]:
        return Finding("problem", "backends", text, "a torch built with gloo: on_rank needs it")
    if torch.cuda.is_available() and not found["nccl"]:
        return Finding("warning", "backends", text, "a torch built with nccl uses the GPUs")
    return Finding("ok", "backends", text)


def _devices(launch: LaunchInfo) -> Finding:
    gpus, ranks = torch.cuda.device_count(), launch.local_world_size
    text = f"{gpus} visible GPU{'s' * (gpus != 1)} for {ranks} local rank{'s' * (ranks != 1)}"
    own = launch.launcher == "slurm" and gpus == 1  # --gpus-per-task=1 shows each task its own
    if 0 < gpus < ranks and not own:
        return Finding("warning", "devices", f"{text}: the CPU", f"start {gpus} to use CUDA")
    return Finding("ok", "devices", text)


def _master(launch: LaunchInfo) -> Finding:
    name = launch.master_addr or socket.gethostname()
    try:
        address = _address(name)
    except OSError as error:
        way_out = f"add {name} to DNS or /etc/hosts, or set MASTER_ADDR to an address"
        level = "problem" if launch.master_addr else "warning"
        return Finding(level, "master", f"{name} does not resolve: {error}", way_out)
    text = f"{name} is {address}"
    if launch.nnodes > 1 and address.is_loopback:
        way_out = "set MASTER_ADDR to an address that the other nodes reach"
        return Finding("problem", "master", f"{text}, which is every node itself", way_out)
    return Finding("ok", "master", text)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    return ipaddress.ip_address(str(address).partition("%")[0])


def _port(launch: LaunchInfo) -> Finding:
    port = launch.master_port if serves(launch) and launch.master_port else 0
    try:
        with socket.create_server(("", port)) as server:
            return Finding("ok", "port", f"port {server.getsockname()[1]} can be bound")
    except OSError as error:
        way_out = "set MASTER_PORT to a free port, or leave the choice to the launcher"
        return Finding("problem", "port", f"port {port} cannot be bound: {error}", way_out)


def _interface(launch: LaunchInfo) -> Finding:
    there = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen and not set(chosen.split(",")) <= set(there):
        way_out = f"one of {', '.join(there)}; NCCL's forms such as ^lo are not for gloo"
        return Finding("problem", "interface", f"GLOO_SOCKET_IFNAME={chosen} is not here", way_out)
    if chosen:
        return Finding("ok", "interface", f"gloo uses {chosen} (GLOO_SOCKET_IFNAME)")
    text = f"of {', '.join(there)}, gloo uses the one that has this host's name"
    if launch.nnodes == 1:
        return Finding("ok", "interface", text)
    try:
        loopback = _address(socket.gethostname()).is_loopback
    except OSError:
        loopback = True
    if loopback:
        way_out = "set GLOO_SOCKET_IFNAME to the interface that the other nodes reach"
        return Finding("problem", "interface", f"{text}, here the loopback", way_out)
    return Finding("ok", "interface", text)


def _all_reduces() -> Iterator[Finding]:
    yield _timed("gloo")
    if not dist.is_nccl_available():
        return
    gpus = torch.cuda.device_count()
    if gpus >= 2:
        yield _timed("nccl")
    else:
        yield Finding("ok", "nccl", f"not timed: two ranks need 2 GPUs, {gpus} visible")


def _timed(backend: str) -> Finding:
    try:
        with redirect_stdout(sys.stderr):  # what the ranks print is no part of the report
            small, large = run_ranks(_all_reduce, backend, nproc=2, timeout=LIMIT)[0]
    except Exception as error:  # noqa: BLE001 - whatever keeps two ranks from meeting is the finding
        text = f"two local ranks failed: {type(error).__name__}: {error}".splitlines()[0]
        return Finding("problem", backend, text, "check the interface, or a firewall on loopback")
    speed = ALL_REDUCE_MIB * 2**20 / large / 1e9
    text = f"2 local ranks: all-reduce of 1 number {1e3 * small:.2f} ms"
    return Finding("ok", backend, f"{text}, of {ALL_REDUCE_MIB} MiB {speed:.1f} GB/s")


def _all_reduce(backend: str) -> tuple[float, float]:
    """Return the median seconds of an all-reduce of one number and of ALL_REDUCE_MIB, on a rank."""
    device = initialize_ddp(backend=backend).device
    small = torch.zeros(1, device=device)
    large = torch.zeros(ALL_REDUCE_MIB * 2**18, device=device)  # float32
    seconds = _median(lambda: dist.all_reduce(small)), _median(lambda: dist.all_reduce(large))
    cleanup_ddp()
    return seconds


def _median(collective: Callable[[], object]) -> float:
    collective()  # the first one also connects
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        collective()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[ROUNDS // 2]


def _write() -> Finding:
    target = Path(f".ddp_ref_doctor_{os.getpid()}")
    temporary = target.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        way_out = "run in a folder that you may write to, with space left"
        return Finding("problem", "write", f"current folder: {error.strerror or error}", way_out)
    target.unlink()
    return Finding("ok", "write", "the current folder takes an atomic write of 1 MiB")
