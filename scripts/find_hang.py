"""Find the rank that a hanging job waits for, and the line where it is. One file to copy.

    python find_hang.py                # while the job hangs, on its machine, in a second terminal
    python find_hang.py logs/ dumps/   # afterwards: NCCL watchdog logs and flight recorder dumps
    srun --overlap --jobid=4711 --nodes=2 --ntasks-per-node=1 python find_hang.py --json |
        python find_hang.py -          # look on several nodes, and compare all ranks

It prints one line per rank and one verdict per job, and exits with 0 if a verdict names ranks, else
with 1. A rank hangs if it stays in the same functions for `--seconds`, while the others only wait.
If the steps of your job take longer, pass a larger value. The job needs no preparation. A live look
needs Linux, psutil, py-spy and the permission to read the memory of processes: run it as root, or
start the container with SYS_PTRACE. If you cannot, pass logs and dumps.
"""

import json
import linecache
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# Frames of the standard library, and those in which torch calls an operator such as wait_tensor.
PASSED = r"/lib(64)?/python3\.\d+/(?!(site|dist)-packages)|^<(frozen|string)|torch/_(ops|library)"
WAITS = re.compile(  # in these files and functions, a rank waits for the others, in C++
    r"torch/distributed/(distributed_c10d|rendezvous|utils|_functional_collectives)\.py (?!__torch)"
    r"|torch/nn/parallel/distributed\.py (_pre_forward|_distributed_broadcast_coalesced)"
    r"|torch/(autograd/graph\.py _engine_run_backward|cuda/__init__\.py synchronize)"
    r"|/(initialize\.py (_connect|_exchange|_wait_for_master)|decorators\.py _wait)"
)
LIBRARY = PASSED + r"|(site|dist)-packages/|/torch/torch/"
OURS = "decorators.py", "initialize.py", "workers.py"  # of ddp_ref, whatever its folder is called
WRAPPERS = {"wrapper", "inner", "inner_func", "_call_impl", "_wrapped_call_impl"}
NAMES = {"backward": "backward (DDP's all-reduce)", "__exit__": "on_rank"}
NAMES |= dict.fromkeys(("__torch_dispatch__", "__repr__", "trigger_wait"), "wait_tensor")
POLLS = {"_wait", "_exchange", "_wait_for_master", "_create_c10d_store"}
BEHIND = " (Python runs ahead of its GPU, which may be in an earlier collective: see the dumps)"
STATES = {"disk-sleep": "is stuck in the kernel", "stopped": "is stopped"}
STATES |= {"tracing-stop": "is stopped", "gone": "has ended", "zombie": "has ended"}
TIMED_OUT = re.compile(r"caught collective operation timeout.*OpType=(\w+), NumelIn=(\d+)")
# nccl2, the process group behind "nccl" since PyTorch 2.15, logs neither the call nor its number.
IN_NCCL2 = re.compile(r"\[TC\].*\[name=(.+?)\] (Operation timed out|nccl hit async error)")
UNNUMBERED, UNNAMED = sys.maxsize, "a collective that its log does not name"
STATUS = re.compile(r"PG GUID (\w+).* enqueued.*? work: (-?\d+).* completed.*? work: (-?\d+)")
UNKNOWN = "no Python line was recorded (DDP's backward has none)"
PY_SPY = shutil.which(Path(sys.executable).with_name("py-spy")) or shutil.which("py-spy")
NO_PERMISSION = "run as root, give the container SYS_PTRACE, or pass logs and dumps instead"
Frames = list[dict[str, Any]]  # a Python stack, innermost function first


class Rank(NamedTuple):
    """What a rank does, or what it did last."""

    job: str
    rank: int
    on_host: list[int]  # the ranks that the launcher started on this host; []: unknown
    host: str = ""
    pid: int = 0  # 0: we only have its log or dump
    waits_in: str = ""  # the call in which it waits for the others; "": it does something else
    state: str = "stands still"  # else, a verb such as "is busy"
    place: str = ""  # its innermost lines outside of libraries

    def does(self) -> str:
        waits = self.waits_in and self.state == "stands still"
        return f"{f'waits in {self.waits_in}' if waits else self.state}: {self.place}"


class Look(NamedTuple):
    """What one look at a process shows."""

    status: str
    sleeps: int  # how often its main thread has gone to sleep since it started
    frames: Frames  # the stack of its main thread
    cuda: bool = False  # whether it uses PyTorch's CUDA build


class Record(NamedTuple):
    """What a rank has recorded about the collectives of one process group."""

    enqueued: int
    completed: int
    calls: dict[int, list[str]]  # by number: the kind and size, and the line
    ranks: int = 0  # how many ranks the job has; 0: unknown


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, strings, lists and dicts only, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump holds plain data, not {module}.{name}")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="logs, dumps, folders; -: the output of --json")
    parser.add_argument("--seconds", type=float, default=5, help="how long to watch (default: 5)")
    parser.add_argument("--json", action="store_true", help="print the ranks as lines of JSON")
    args = parser.parse_args()
    ranks = read_files(args.paths) if args.paths else look_at_ranks(args.seconds)
    if args.json:
        print(*(json.dumps(each._asdict()) for each in ranks), sep="\n")
    else:
        sys.exit(not report(ranks))


def report(ranks: list[Rank]) -> bool:
    """Print what all ranks do and a verdict per job; return whether a verdict names ranks."""
    found = []
    for job, its in groupby(sorted(ranks), lambda each: each.job):
        print(job)
        for each in (members := [*its]):
            process = f" ({each.host}, process {each.pid})" * bool(each.pid)
            print(f"  rank {each.rank} {each.does()}{process}")
        names_ranks, sentence = verdict(members)
        print("  verdict:" if names_ranks else "  no verdict:", sentence)
        found.append(names_ranks)
    if not ranks:
        print("no verdict: found no ranks; is this the job's user, host and container, or its log?")
    return any(found)


def verdict(ranks: list[Rank]) -> tuple[bool, str]:
    """Return whether some ranks of a job hold up the others, and a sentence that says so."""
    waiting = [each for each in ranks if each.waits_in]
    elsewhere = [f"rank {each.rank}, which {each.does()}" for each in ranks if not each.waits_in]
    states = {each.state: each for each in ranks}
    if len(ranks) > len({each.rank for each in ranks}):
        return False, "several processes have the same rank: other programs, or several jobs"
    if gone := states.get("has ended"):
        return False, f"rank {gone.rank} has ended while we looked: look again"
    if stopped := states.get("is stopped"):
        return True, f"rank {stopped.rank} is stopped; `kill -CONT {stopped.pid}` lets it go on"
    if not waiting:
        return False, "no rank waits for another"
    if any(each.state == "is busy" for each in waiting):
        return False, "the job makes progress"
    if busy := states.get("is busy"):
        return False, f"the others wait for rank {busy.rank}, which is busy: look again in a minute"
    if elsewhere:
        return True, "the others wait for " + "; and for ".join(elsewhere)
    if missing := {n for each in ranks for n in each.on_host} - {each.rank for each in ranks}:
        return True, f"the others wait for rank {min(missing)}, which left no process, log or dump"
    # A record tells the size of a call. A live stack does not, so there the line has to do.
    calls = [(each.waits_in, each.pid and each.place) for each in waiting]
    (common, count), *others = Counter(calls).most_common()
    if not others and common[0] == UNNAMED:
        return False, f"of {count} ranks, we only know that they failed: add their dumps"
    if not others:
        hint = "look at other hosts and logs, then compare sizes (in dumps), then check the network"
        return False, f"the ranks that we see ({count}) wait in the same call: {hint}"
    these = [f"rank {each.rank} {each.does()}" for each in waiting]
    if count > len(ranks) / 2:
        these = [this for this, call in zip(these, calls, strict=True) if call != common]
        these.append(f"most others wait in {common[0]}")
    return True, "the ranks wait in different calls: " + "; ".join(these)


def look_at_ranks(seconds: float) -> list[Rank]:
    """Find the processes of this host that are ranks, not launchers or workers, and watch them."""
    ranks: dict[int, Rank] = {}
    node = {"SLURM_JOB_ID", "SLURM_NODEID"}  # if srun has started us, we look at its job's ranks
    mine = {name: os.environ[name] for name in node} if node <= os.environ.keys() else {}
    for process in sorted(psutil.process_iter(), key=psutil.Process.create_time):
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if "python" not in process.exe() or Path(__file__).name in str(process.cmdline()):
                continue
            env = process.environ()
            if not mine.items() <= env.items() or not (rank := as_rank(process, env)):
                continue
            above = [ranks[each.pid] for each in process.parents() if each.pid in ranks]
            # A DataLoader's worker has its rank's variables, or is forked from a rank without any.
            if any(each[:3] == rank[:3] or "of process" in each.job for each in above):
                continue
            ranks[process.pid] = rank._replace(host=os.uname().nodename, pid=process.pid)
            for each in above:  # a launcher, in a step of srun or in a pod with a RANK
                if each.job.startswith("Slurm") or not each.on_host:
                    del ranks[each.pid]
    rounds = []
    for pause in (0, seconds / 2, seconds / 2):
        time.sleep(pause)
        rounds.append([look_at(pid) for pid in ranks])
    return [summarize(rank, looks) for rank, *looks in zip(ranks.values(), *rounds, strict=True)]


def as_rank(process: psutil.Process, env: dict[str, str]) -> Rank | None:
    """Return which rank a launcher has made of a process, if any."""
    # If a script that srun has started sets RANK itself, only its workers have it from birth.
    if env.get("RANK", "").isdigit() and ("SLURM_GTIDS" not in env or "LOCAL_WORLD_SIZE" in env):
        rank, size = int(env["RANK"]), int(env.get("LOCAL_WORLD_SIZE", 0))
        first = rank - int(env.get("LOCAL_RANK", 0))
        job = f"job at {env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
        if attempt := int(env.get("TORCHELASTIC_RESTART_COUNT", 0)):
            job += f", restarted {attempt} times"
        return Rank(job, rank, [*range(first, first + size)])
    frames = look_at(process.pid).frames
    names = [each["name"] for each in frames]
    if "_bootstrap" in names and "_worker_loop" not in names:  # a child of mp.spawn or mp.Process
        child = frames[: names.index("_bootstrap")]
        spawned = [each for each in child if each["name"] == "_wrap"]
        called = spawned or own(child)[-1:]
        its = {each["name"]: each["repr"] for frame in called for each in frame["locals"] or []}
        if (number := its.get("i" if spawned else "rank") or its.get("local_rank") or "").isdigit():
            return Rank(f"ranks of process {process.ppid()}", int(number), [int(number)])
    if {"SLURM_STEP_ID", "SLURM_GTIDS"} <= env.keys():
        job = f"Slurm step {env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
        return Rank(job, int(env["SLURM_PROCID"]), [*map(int, env["SLURM_GTIDS"].split(","))])
    return None


def look_at(pid: int) -> Look:
    """Return what a process does now. This does not pause the process."""
    if not PY_SPY:
        sys.exit("error: py-spy is missing: pip install py-spy")
    command = [PY_SPY, "dump", "--json", "--locals", "--nonblocking", "--pid", str(pid)]
    status, sleeps = "gone", 0
    for _ in range(3):  # what py-spy reads may change meanwhile
        with suppress(psutil.NoSuchProcess, OSError, subprocess.TimeoutExpired, ValueError):
            process = psutil.Process(pid)
            status, sleeps = process.status(), process.num_ctx_switches().voluntary
            dump = subprocess.run(command, capture_output=True, text=True, timeout=10)
            if "ermission" in dump.stderr:
                sys.exit(f"error: no permission to read process {pid}: {NO_PERMISSION}")
            threads = json.loads(dump.stdout)
            threads.sort(key=lambda each: each["thread_name"] != "MainThread")
            main_thread = max(threads, key=lambda each: each["os_thread_id"] == pid)
            for frame in (frames := main_thread["frames"]):  # since 3.11, its name is qualified
                frame["name"] = frame["name"].rpartition(".")[2]
            maps = Path(f"/proc/{pid}/maps").read_text()
            return Look(status, sleeps, frames, "libtorch_cuda" in maps)
    return Look(status, sleeps, [])


def summarize(rank: Rank, looks: list[Look]) -> Rank:
    """Return what a rank does, from all looks at it."""
    calls, stacks = [waited_call(look) for look in looks], [look.frames for look in looks]
    # It has not moved if it is in the same functions: it may be in a loop.
    seen: list[Any] = [[(each["filename"], each["name"]) for each in stack] for stack in stacks]
    if all(calls):  # it still waits if it has not woken up, except to poll, in the same call
        seen = [[each for each in stack if each["name"] not in POLLS] for stack in stacks]
        if seen == stacks:
            seen = [(look.sleeps, look.frames) for look in looks]
    state = STATES.get(looks[-1].status, "stands still")
    moves = any(each != seen[0] for each in seen)
    # A rank that computes in `backward` does not wait. (One that waits for its GPU may spin.)
    computes = all(calls) and any(each.status == "running" and not each.cuda for each in looks)
    if state in ("stands still", STATES["disk-sleep"]) and (moves or computes):
        state = "is busy"
    place = " < ".join(map(describe, own(stacks[-1])[:2])) or "no line of your code"
    if any("dataloader.py" in each["filename"] for each in stacks[-1]):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            place += worker_of(rank.pid)
    return rank._replace(waits_in=calls[-1], state=state, place=place)


def waited_call(look: Look) -> str:
    """Return the call in which a stack waits for other ranks; "" if it does something else."""
    frames = [each for each in look.frames if not re.search(PASSED, each["filename"])]
    names = [each["name"] for each in frames]
    inner = len(list(takewhile(lambda each: in_library(each["filename"]), frames)))
    if inner and WAITS.search(f"{frames[0]['filename']} {names[0]}"):
        called = [name for name in names[:inner] if name not in WRAPPERS] or names[:1]
        return NAMES.get(called[-1], called[-1]) + BEHIND * look.cuda
    for frame in own(look.frames[:1]):  # a call in C++ has no frame, but the line shows it
        found = re.search(r"\.(wait|item|tolist|cpu|numpy|synchronize)\(", describe(frame))
        if found and (look.cuda or found[1] == "wait"):
            return found[1] + BEHIND * look.cuda
    return ""


def own(frames: Frames) -> Frames:
    return [each for each in frames if not in_library(each["filename"])]


def in_library(path: str) -> bool:
    file = Path(path)
    copied = file.parent.name == "ddp_ref" or file.with_name("launch.py").exists()
    return (file.name in OURS and copied) or bool(re.search(LIBRARY, path))


def describe(frame: dict[str, Any]) -> str:
    source = linecache.getline(frame["filename"], frame["line"]).strip()
    path = frame["filename"].removeprefix(f"{Path.cwd()}/")
    return f"{path}:{frame['line']} in {frame['name']}" + f" `{source}`" * bool(source)


def worker_of(pid: int) -> str:
    """Return where a DataLoader worker of this rank is, if it does not wait for work."""
    for child in psutil.Process(pid).children(recursive=True):
        look = look_at(child.pid)
        inner = list(takewhile(lambda each: each["name"] != "_worker_loop", look.frames))
        if STATES.get(look.status) == "is stopped":
            return f"; its child, process {child.pid}, is stopped"
        if len(inner) < len(look.frames) and own(inner):
            return f"; its DataLoader worker, process {child.pid}: {describe(own(inner)[0])}"
    return ""


def read_files(paths: list[str]) -> list[Rank]:
    """Return what all ranks did last, from logs and dumps, or from the lines of --json."""
    if paths == ["-"]:
        return [Rank(**json.loads(line)) for line in sys.stdin if line.strip()]
    records: dict[str, dict[int, Record]] = defaultdict(dict)  # by group and rank
    if missing := [path for path in paths if not Path(path).exists()]:
        sys.exit(f"error: {missing[0]} does not exist")
    found = (path.rglob("*") if path.is_dir() else [path] for path in map(Path, paths))
    for file in (file for each in found for file in each if file.is_file()):
        with file.open("rb") as opened:
            head = opened.read(1000)
        is_dump = head.startswith(b"\x80")
        if not is_dump and b"\0" in head:  # a checkpoint, for example
            continue
        for group, rank, record in read_dump(file) if is_dump else read_log(file):
            if is_dump or rank not in records[group]:  # later in its log, a rank may have gone on
                records[group][rank] = record
    ranks = [rank for group, its in records.items() for rank in last_calls(group, its)]
    # A rank that waits in another group cannot help it, so we leave it out here.
    waiting = {each.rank for each in ranks if each.waits_in}
    kept = [each for each in ranks if each.waits_in or each.rank not in waiting]
    return [each._replace(on_host=[*{*each.on_host} - waiting]) for each in kept]


def read_log(file: Path) -> Iterator[tuple[str, int, Record]]:
    """Yield what NCCL's watchdog has logged, with the group and the rank."""
    timed_out: dict[int, list[str]] = {}  # by rank: its call
    call = [""] * 2
    for line in re.split(r"\n|(?=\[rank\d+\]:)", file.read_text(errors="replace")):
        rank = int(found[1]) if (found := re.search(r"[Rr]ank[ =]?(\d+)\]", line)) else -1
        if found := IN_NCCL2.search(line):
            calls = {UNNUMBERED: [UNNAMED, UNKNOWN]}
            yield found[1], rank, Record(UNNUMBERED, UNNUMBERED - 1, calls)
        if found := TIMED_OUT.search(line):
            timed_out.setdefault(rank, [describe_call(found[1], int(found[2])), UNKNOWN])
        if found := STATUS.search(line):
            enqueued, completed = int(found[2]), int(found[3])
            calls = {completed + 1: timed_out[rank]} if rank in timed_out else {}
            yield found[1], rank, Record(enqueued, completed, calls)
        if "Stack trace of the failed collective:" in line:
            call = timed_out.get(rank, call)
        found = re.search(r"^#\d+ (\S+) from (.+):(\d+)$", line)
        if found and call[1] == UNKNOWN and not in_library(found[2]):
            call[1] = f"{found[2]}:{found[3]} in {found[1]}"


def read_dump(file: Path) -> Iterator[tuple[str, int, Record]]:
    """Yield what a flight recorder's dump says, with the group and the rank."""
    groups: dict[str, tuple[dict[int, list[str]], list[int]]] = {"0": ({}, [])}  # 0: all ranks
    try:
        rank = int(re.findall(r"\d+$", file.stem)[0])
        with file.open("rb") as opened:
            dump = PlainUnpickler(opened).load()
        entries = [each for each in dump["entries"] if not each.get("is_p2p")]
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
        print(f"left out: {file} is not a complete dump of a rank: {error!r}", file=sys.stderr)
        return
    for each in entries:
        calls, pending = groups.setdefault(each["process_group"][0], ({}, []))
        number, kind = each["collective_seq_id"], each["profiling_name"].rpartition(":")[2]
        lines = [*map(describe, own(each.get("frames", []))), UNKNOWN]
        calls[number] = [describe_call(kind, sum(map(math.prod, each["input_sizes"]))), lines[0]]
        pending += [] if each["retired"] else [number]
    # With nccl2, the rank that is late may leave no dump, but the others' dumps list all ranks.
    ranks = len(re.findall(r"\d+", dump.get("pg_config", {}).get("0", {}).get("ranks", "")))
    for group, (calls, pending) in groups.items():
        enqueued = max(calls, default=0)
        # With Gloo, the dump's pg_status may lag behind the last collective that has completed.
        yield group, rank, Record(enqueued, min(pending, default=enqueued + 1) - 1, calls, ranks)


def describe_call(kind: str, elements: int) -> str:
    kind = kind.replace("_", "").lower()  # a dump says all_reduce, a log ALLREDUCE
    uneven = kind.startswith(("gather", "scatter", "alltoall"))  # sizes may differ between ranks
    return kind if uneven else f"{kind} of {elements} elements"


def last_calls(group: str, records: dict[int, Record]) -> Iterator[Rank]:
    """Yield where each rank of a group is, at its first call that not all ranks have completed."""
    number = max(0, min(each.completed for each in records.values())) + 1
    calls = [each.calls[number] for each in records.values() if number in each.calls]
    # A rank whose own record has lost this call gets the others' kind and size.
    lost = [calls[0][0] if calls else "a call", UNKNOWN]
    size = max(max(records) + 1, *(each.ranks for each in records.values()))
    for rank, record in records.items():
        last = Rank(f"process group {group}", rank, [*range(size)] if group == "0" else [])
        if record.enqueued >= number:
            call, line = record.calls.get(number, lost)
            waits_in = call if number == UNNUMBERED else f"collective {number}, {call}"
            yield last._replace(waits_in=waits_in, place=line)
        else:
            before = f"has not called collective {number}; its last was {record.enqueued}"
            place = ", ".join(record.calls.get(record.enqueued, [UNKNOWN]))
            yield last._replace(state=before, place=place)


if __name__ == "__main__":
    main()
