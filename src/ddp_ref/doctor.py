"""Check what this machine and this launch can run: one line per check, with advice."""

import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import sys
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from datetime import timedelta
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.cuda import nccl

from .environment import LaunchInfo, detect_launch
from .initialize import cleanup_ddp, initialize_ddp
from .rendezvous import hosts_store
from .workers.run_ranks import run_ranks

BUCKET = 25 * 2**18  # float32 numbers: 25 MiB, DDP's default bucket_cap_mb
ROUNDS, LIMIT = 5, timedelta(seconds=45)
ROOT = Path("/")  # of the files with which Linux describes the machine


class CheckResult(NamedTuple):
    """One line of the report; `level` is "ok", "warning" or "problem"."""

    level: str
    check: str
    text: str
    advice: str = ""


def doctor(as_json: bool = False) -> int:
    """Check this machine and this launch, and print each result as soon as it is known.

    Slow checks announce themselves on stderr.

    Args:
        as_json: Print one JSON list of the results, instead of a line per check and a summary.

    Returns:
        The exit code: 1 if there is a problem, else 0.
    """
    results = []
    for result in run_checks():
        results.append(result)
        if not as_json:
            advice = f" -> {result.advice}" if result.advice else ""
            print(f"{result.level:<8} {result.check:<9} {result.text}{advice}", flush=True)
    levels = Counter(result.level for result in results)
    if as_json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    else:
        warnings, problems = (_count(levels[noun], noun) for noun in ("warning", "problem"))
        print(f"doctor: {levels['ok']} ok, {warnings}, {problems}")
    return int(levels["problem"] > 0)


def run_checks() -> Iterator[CheckResult]:
    """Yield the result of each check, with the cause of a problem before its consequences."""
    try:
        launch = detect_launch()
    except ValueError as error:  # _launch reports it
        launch = LaunchInfo(launcher="none", reason=str(error))
    yield from (_run_check(check, launch) for check in CHECKS)


def _run_check(check: Callable[[LaunchInfo], str], launch: LaunchInfo) -> CheckResult:
    """Run a check: it returns its text, raises a Warning, or raises anything else for a problem."""
    name = check.__name__.strip("_")
    try:
        return CheckResult("ok", name, check(launch))
    except Exception as error:  # noqa: BLE001 - one check that fails must not hide the others
        level = "warning" if isinstance(error, Warning) else "problem"
        return CheckResult(level, name, (str(error) or repr(error)).split("\n")[0], CHECKS[check])


def _platform(_: LaunchInfo) -> str:
    text = f"{platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}, "
    text += f"CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads"
    if sys.platform != "linux":
        raise RuntimeError(text) if sys.platform == "win32" else UserWarning(text)
    return text


def _launch(_: LaunchInfo) -> str:
    launch = detect_launch()
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if launch.launcher == "none" and tasks != "1":
        raise UserWarning(f"SLURM_NTASKS={tasks}, but srun did not start this process: it is alone")
    text = f"launcher {launch.launcher}: rank {launch.rank} of {launch.world_size}, local rank "
    text += f"{launch.local_rank} of {launch.local_world_size}, {_count(launch.nnodes, 'node')}"
    return f"{text} ({launch.reason})"


def _backends(_: LaunchInfo) -> str:
    if not (dist.is_available() and dist.is_gloo_available()):
        raise RuntimeError("this build of torch has no gloo, which on_rank needs")
    if dist.is_nccl_available():
        return f"gloo, NCCL {'.'.join(map(str, cast(Any, nccl).version()))}"
    if torch.cuda.is_available():
        raise UserWarning("this build of torch has no NCCL, so DDP cannot use the GPUs")
    return "gloo, no NCCL"


def _devices(launch: LaunchInfo) -> str:
    gpus, ranks = torch.cuda.device_count(), launch.local_world_size
    models = sorted({*map(torch.cuda.get_device_name, range(gpus))})
    version = re.search(r"\d+\.[\d.]+", _read(ROOT / "proc/driver/nvidia/version"))
    driver = f"driver {version[0]}" if version else "driver unknown" if gpus else "no driver"
    text = f"{_count(gpus, 'visible GPU')} for {_count(ranks, 'local rank')}"
    text += f" ({', '.join([*models, driver])})"
    # Slurm's --gpus-per-task=1 shows each task one GPU, its own.
    if 0 < gpus < ranks and not (launch.launcher == "slurm" and gpus == 1):
        raise UserWarning(f"{text}: too few, so all ranks run on the CPU")
    return text


def _limits(_: LaunchInfo) -> str:
    folder = ROOT / "dev/shm"
    shared = shutil.disk_usage(folder).total if folder.exists() else inf
    cores, memory = _cgroup_limits()
    text = f"CPU {_amount(cores, 'cores')}, memory {_amount(memory / 2**30, 'GiB')}, "
    text += f"/dev/shm {_amount(shared / 2**30, 'GiB')}"
    if shared < 2**28:  # docker gives a container 64 MiB
        raise UserWarning(f"{text}: DataLoader workers and NCCL crash when /dev/shm is full")
    return text


def _amount(number: float, unit: str) -> str:
    return "no limit" if number > 2**30 else f"{number:.3g} {unit}"


def _cgroup_limits() -> tuple[float, float]:
    """Return how many CPU cores and bytes of memory this process may use; inf without a limit.

    A group's parents limit it as well. Version 1 has a folder per controller, version 2 has none.
    """
    cores = memory = inf
    for line in _read(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        group = ROOT / "sys/fs/cgroup" / controllers / path.strip("/")
        for folder in (group, *group.parents):
            cpu = _numbers(folder, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
            if cpu:  # microseconds of CPU time, in a period of so many microseconds
                cores = min(cores, cpu[0] / cpu[1])
            memory = min([memory, *_numbers(folder, "memory.max", "memory.limit_in_bytes")])
    return cores, memory


def _numbers(folder: Path, *names: str) -> list[float]:
    words = " ".join(_read(folder / name) for name in names).split()
    return [inf if word in ("max", "-1") else float(word) for word in words]


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _master(launch: LaunchInfo) -> str:
    name = launch.master_addr or socket.gethostname()
    try:
        address = _address(name)
    except OSError as error:
        kind = RuntimeError if launch.master_addr else UserWarning
        raise kind(f"the name of rank 0's host, {name}, does not resolve: {error}") from error
    if launch.nnodes > 1 and address.is_loopback:
        raise RuntimeError(f"{name} is {address}, a loopback address: other nodes cannot reach it")
    return f"rank 0's host is {name}, at {address}"


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    return ipaddress.ip_address(str(address).partition("%")[0])


def _port(launch: LaunchInfo) -> str:
    port = launch.master_port if hosts_store(launch) and launch.master_port else 0
    with socket.create_server(("", port)) as server:
        return f"port {server.getsockname()[1]} is free"


def _interface(launch: LaunchInfo) -> str:
    names = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not set(chosen.split(",")) <= {*names, ""}:
        raise RuntimeError(f"GLOO_SOCKET_IFNAME={chosen}, but there is only {', '.join(names)}")
    if not chosen and launch.nnodes > 1 and _address(socket.gethostname()).is_loopback:
        raise RuntimeError("this host's name is a loopback address: other nodes cannot reach it")
    return f"gloo uses {chosen or 'the address of this host'}, out of {', '.join(names)}"


def _gloo(launch: LaunchInfo) -> str:
    return _timed("gloo", 2, launch)


def _nccl(launch: LaunchInfo) -> str:
    gpus = torch.cuda.device_count()
    if gpus < 2 or not dist.is_nccl_available():
        return f"not measured: this needs NCCL and two GPUs ({_count(gpus, 'GPU')} visible)"
    return _timed("nccl", gpus, launch)


def _timed(backend: str, ranks: int, launch: LaunchInfo) -> str:
    """Return how fast an all-reduce is; only local rank 0 measures, so that no ranks compete."""
    if launch.local_rank > 0:
        return "not measured here: local rank 0 does it"
    # stderr is line-buffered: the line is there before the wait begins.
    print(f"doctor: starting {ranks} {backend} ranks, up to {LIMIT.seconds} s ...", file=sys.stderr)
    with redirect_stdout(sys.stderr):  # what the ranks print is no part of the report
        small, large = run_ranks(_all_reduce, backend, nproc=ranks, timeout=LIMIT)[0]
    text = f"{1e3 * small:.2f} ms for one number, {4 * BUCKET / large / 1e9:.1f} GB/s for 25 MiB"
    return f"all-reduce on {ranks} local ranks: {text}"


def _all_reduce(backend: str) -> list[float]:
    """Return the median seconds of an all-reduce of one number and of 25 MiB, on a rank."""
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA starts, so that no GPU is touched
    device = initialize_ddp(backend=backend).device
    seconds = [_median_seconds(torch.zeros(size, device=device)) for size in (1, BUCKET)]
    cleanup_ddp()
    return seconds


def _median_seconds(tensor: torch.Tensor) -> float:
    def all_reduce() -> None:
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for a GPU

    return median(timeit.repeat(all_reduce, number=1, repeat=1 + ROUNDS)[1:])  # the first connects


def _write(_: LaunchInfo) -> str:
    with TemporaryDirectory(prefix=".ddp_ref_doctor_", dir=".") as folder:
        with Path(folder, "new").open("wb") as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
        Path(folder, "new").replace(Path(folder, "old"))
    return "the current folder takes files: wrote and renamed 1 MiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


CHECKS: dict[Callable[[LaunchInfo], str], str] = {  # in this order, each with its advice
    _platform: "use Linux, or WSL2 on Windows: we test nothing else",
    _launch: "start the ranks with torchrun or srun, and unset their variables if you set any",
    _backends: "install a torch wheel with gloo, and for GPUs one with CUDA, which brings NCCL",
    _devices: "start at most one rank per GPU; run nvidia-smi to see whether the driver works",
    _limits: "give /dev/shm at least 1 GiB; in a container, docker run --shm-size=8g",
    _master: "set MASTER_ADDR to an address that all nodes reach, or fix DNS or /etc/hosts",
    _port: "set MASTER_PORT to a free port, or let torchrun or srun choose one",
    _interface: "set GLOO_SOCKET_IFNAME to an interface that all nodes reach; ^lo does not work",
    _gloo: "check GLOO_SOCKET_IFNAME, and whether a firewall blocks connections within this host",
    _nccl: "enlarge /dev/shm or set NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO shows NCCL's own reason",
    _write: "change to a folder that you may write to and that has space left",
}
