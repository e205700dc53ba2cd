"""Find the rank that a hanging job waits for, and the line where it is. One file to copy.

    python find_hang.py                # while the job hangs, on its machine, in a second terminal
    python find_hang.py logs/ dumps/   # afterwards: NCCL watchdog logs and flight recorder dumps
    srun --overlap --jobid=4711 --nodes=2 --ntasks-per-node=1 python find_hang.py --json |
        python find_hang.py -          # look on several nodes, and compare all ranks

It prints one line per rank and one verdict per job, and exits with 0 if a verdict names ranks, else
with 1. A rank hangs if it stays in the same functions for `--seconds`, while the others only wait.
If the steps of your job take longer, pass a larger value. The job needs no preparation and does not
notice. A live look needs Linux, psutil, py-spy and the permission to read the memory of processes:
run it as root, or start the container with `--cap-add SYS_PTRACE`.
"""

import argparse
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
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

STDLIB = re.compile(r"/lib(?:64)?/python3\.\d+/(?!site-packages|dist-packages)|^<(frozen|string)")
# In these files and functions, a rank waits for the others, in C++.
WAITS = re.compile(
    r"torch/distributed/(distributed_c10d|rendezvous|utils)\.py"
    r"|torch/nn/parallel/distributed\.py (_pre_forward|_distributed_broadcast_coalesced)"
    r"|torch/(autograd/graph\.py _engine_run_backward|cuda/__init__\.py synchronize)"
    r"|ddp_ref/(initialize\.py|decorators\.py _wait)"
)
LIBRARY = re.compile(
    STDLIB.pattern + r"|(site|dist)-packages/|/torch/torch/|ddp_ref/(decorators|initialize|workers)"
)
WAITING_LINE = re.compile(r"\.(wait|item|tolist|cpu|numpy|synchronize)\(")
WRAPPERS = {"wrapper", "inner", "inner_func", "_call_impl", "_wrapped_call_impl"}
NAMES = {"backward": "backward (DDP's all-reduce)", "__exit__": "on_rank"}
POLLS = {
    "_wait",
    "_exchange",
    "_wait_for_master",
    "_create_c10d_store",
}  # wake up now and then while they wait
BEHIND = " (Python runs ahead of its GPU, which may be in an earlier collective: see the dumps)"
STATES = {"disk-sleep": "is stuck in the kernel", "stopped": "is stopped"}
STATES |= {"tracing-stop": "is stopped", "gone": "has ended", "zombie": "has ended"}
UNEVEN = {"gather", "scatter", "alltoall", "alltoallbase"}  # their sizes may differ between ranks
TIMED_OUT = re.compile(r"caught collective operation timeout.*OpType=(\w+), NumelIn=(\d+)")
STATUS = re.compile(
    r"PG GUID (\w+).*[Ll]ast enqueued (?:NCCL )?work: (-?\d+).*last completed.* work: (-?\d+)"
)
STACK_LINE = re.compile(r"^#\d+ (\S+) from (.+):(\d+)$")
UNKNOWN = "a line that was not recorded"
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


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, strings, lists and dicts only, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump holds plain data, not {module}.{name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="logs, dumps, folders; -: the output of --json")
    parser.add_argument("--seconds", type=float, default=5, help="how long to watch (default: 5)")
    parser.add_argument("--json", action="store_true", help="print the ranks as lines of JSON")
    args = parser.parse_args()
    if args.paths == ["-"]:
        ranks = [Rank(**json.loads(line)) for line in sys.stdin if line.strip()]
    else:
        ranks = read_files(args.paths) if args.paths else look_at_ranks(args.seconds)
    if args.json:
        print(*(json.dumps(each._asdict()) for each in ranks), sep="\n")
    else:
        sys.exit(not report(ranks))


def report(ranks: list[Rank]) -> bool:
    """Print what all ranks do and a verdict per job; return whether a verdict names ranks."""
    jobs: dict[str, list[Rank]] = defaultdict(list)
    for rank in sorted(ranks):
        jobs[rank.job].append(rank)
    found = False
    for job, members in jobs.items():
        print(job)
        for each in members:
            process = f" ({each.host}, process {each.pid})" if each.pid else ""
            print(f"  rank {each.rank} {each.does()}{process}")
        names_ranks, sentence = verdict(members)
        print("  verdict:" if names_ranks else "  no verdict:", sentence)
        found |= names_ranks
    if not jobs:
        print("no verdict: found no ranks; is this the job's user, host and container, or its log?")
    return found


def verdict(ranks: list[Rank]) -> tuple[bool, str]:
    """Return whether some ranks of a job hold up the others, and a sentence that says so."""
    waiting = [each for each in ranks if each.waits_in]
    elsewhere = [each for each in ranks if not each.waits_in]
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
        named = (f"rank {each.rank}, which {each.does()}" for each in elsewhere)
        return True, "the others wait for " + "; and for ".join(named)
    if missing := {n for each in ranks for n in each.on_host} - {each.rank for each in ranks}:
        return True, f"the others wait for rank {min(missing)}, which left no process, log or dump"
    # A record tells the size of a call. A live stack does not, so there the line has to do.
    calls = [(each.waits_in, each.pid and each.place) for each in waiting]
    (common, count), *others = Counter(calls).most_common()
    if not others:
        hint = "look at other hosts and logs, then compare sizes (in dumps), then check the network"
        return False, f"the ranks that we see ({count}) wait in the same call: {hint}"
    these = [f"rank {each.rank} {each.does()}" for each in waiting]
    if count > len(ranks) / 2:
        these = [this for this, call in zip(these, calls, strict=True) if call != common]
        these.append(f"most others wait in {common[0]}")
    return True, "the ranks wait in different calls: " + "; ".join(these)


def look_at_ranks(seconds: float) -> list[Rank]:
    """Watch the ranks of all jobs on this host."""
    ranks = find_ranks()
    rounds = []
    for pause in (0, seconds / 2, seconds / 2):
        time.sleep(pause)
        rounds.append([look_at(rank.pid) for rank in ranks])
    return [summarize(rank, looks) for rank, *looks in zip(ranks, *rounds, strict=True)]


def find_ranks() -> list[Rank]:
    """Return the processes of this host that are ranks, and not launchers or workers of ranks."""
    ranks: dict[int, Rank] = {}
    node = {"SLURM_JOB_ID", "SLURM_NODEID"}  # if srun has started us, we look at its job's ranks
    mine = {name: os.environ[name] for name in node} if node <= os.environ.keys() else {}
    for process in sorted(psutil.process_iter(), key=psutil.Process.create_time):
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if "python" not in process.exe() or Path(__file__).name in str(process.cmdline()):
                continue
            env = process.environ()
            rank = as_rank(process, env) if mine.items() <= env.items() else None
            above = [ranks[each.pid] for each in process.parents() if each.pid in ranks]
            # A DataLoader's worker has its rank's variables, or is forked from a rank of mp.spawn.
            inherited = [each._replace(pid=process.pid) for each in above]
            forked = any(each.job.startswith("mp.spawn") for each in above)
            if rank and rank not in inherited and not forked:
                ranks[process.pid] = rank
                for each in above:  # a launcher, in a step of srun or in a pod with a RANK
                    if each.job.startswith("Slurm") or not each.on_host:
                        del ranks[each.pid]
    return [*ranks.values()]


def as_rank(process: psutil.Process, env: dict[str, str]) -> Rank | None:
    """Return which rank a launcher has made of a process, if any."""
    host = os.uname().nodename
    # A script that srun has started may set RANK itself: then only its workers have it from birth.
    by_srun = "SLURM_GTIDS" in env and "LOCAL_WORLD_SIZE" not in env
    if env.get("RANK", "").isdigit() and not by_srun:  # set by torchrun, run_ranks and others
        rank, size = int(env["RANK"]), int(env.get("LOCAL_WORLD_SIZE", 0))
        first = rank - int(env.get("LOCAL_RANK", 0))
        job = f"job at {env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
        if attempt := int(env.get("TORCHELASTIC_RESTART_COUNT", 0)):
            job += f", restarted {attempt} times"
        return Rank(job, rank, [*range(first, first + size)], host, process.pid)
    for frame in look_at(process.pid).frames:
        if (frame["name"], Path(frame["filename"]).name) == ("_wrap", "spawn.py"):
            its = [each["repr"] for each in frame["locals"] or [] if each["name"] == "i"]
            if its and its[0].isdigit():  # else py-spy has read a stack that just changed
                job = f"mp.spawn of process {process.ppid()}"
                return Rank(job, int(its[0]), [int(its[0])], host, process.pid)
    if {"SLURM_STEP_ID", "SLURM_GTIDS"} <= env.keys():
        job = f"Slurm step {env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
        on_host = [*map(int, env["SLURM_GTIDS"].split(","))]
        return Rank(job, int(env["SLURM_PROCID"]), on_host, host, process.pid)
    return None


def look_at(pid: int) -> Look:
    """Return what a process does now. This does not pause the process."""
    beside = Path(sys.executable).with_name("py-spy")
    if not (py_spy := shutil.which(beside) or shutil.which("py-spy")):
        sys.exit("error: py-spy is missing: pip install py-spy")
    command = [py_spy, "dump", "--json", "--locals", "--nonblocking", "--pid", str(pid)]
    status, sleeps = "gone", 0
    for _ in range(3):  # what py-spy reads may change meanwhile
        with suppress(psutil.NoSuchProcess, OSError, subprocess.TimeoutExpired, ValueError):
            process = psutil.Process(pid)
            status, sleeps = process.status(), process.num_ctx_switches().voluntary
            dump = subprocess.run(command, capture_output=True, text=True, timeout=10)
            if "ermission" in dump.stderr:
                sys.exit(f"error: no permission to read process {pid}: use sudo, or SYS_PTRACE")
            threads = json.loads(dump.stdout)
            threads.sort(key=lambda each: each["thread_name"] != "MainThread")
            main_thread = max(threads, key=lambda each: each["os_thread_id"] == pid)
            cuda = "libtorch_cuda" in Path(f"/proc/{pid}/maps").read_text()
            frames = main_thread["frames"]
            for frame in frames:  # since Python 3.11, the name is qualified
                frame["name"] = frame["name"].rpartition(".")[2]
            return Look(status, sleeps, frames, cuda)
    return Look(status, sleeps, [])


def summarize(rank: Rank, looks: list[Look]) -> Rank:
    """Return what a rank does, from all looks at it."""
    calls, stacks = [waited_call(look) for look in looks], [look.frames for look in looks]
    seen: list[Any]
    if all(calls):  # it still waits if it has not woken up since, and its variables are the same
        seen = [[each for each in stack if each["name"] not in POLLS] for stack in stacks]
        if seen == stacks:
            seen = [(look.sleeps, look.frames) for look in looks]
    else:  # it has not moved if it is in the same functions: it may be in a loop
        seen = [[(each["filename"], each["name"]) for each in stack] for stack in stacks]
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
    frames = [each for each in look.frames if not STDLIB.search(each["filename"])]
    names = [each["name"] for each in frames]
    inner = len(list(takewhile(lambda each: LIBRARY.search(each["filename"]), frames)))
    if inner and WAITS.search(f"{frames[0]['filename']} {names[0]}"):
        called = [name for name in names[:inner] if name not in WRAPPERS] or names[:1]
        return NAMES.get(called[-1], called[-1]) + BEHIND * look.cuda
    for frame in own(look.frames[:1]):  # a call in C++ has no frame, but the line shows it
        found = WAITING_LINE.search(describe(frame))
        if found and (look.cuda or found[1] == "wait"):
            return found[1] + BEHIND * look.cuda
    return ""


def own(frames: Frames) -> Frames:
    return [each for each in frames if not LIBRARY.search(each["filename"])]


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
    """Return what all ranks did last, from logs and dumps."""
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
    return [
        each._replace(on_host=[*{*each.on_host} - waiting])
        for each in ranks
        if each.waits_in or each.rank not in waiting
    ]


def read_log(file: Path) -> Iterator[tuple[str, int, Record]]:
    """Yield what NCCL's watchdog has logged, with the group and the rank."""
    timed_out: dict[int, list[str]] = {}  # by rank: its call
    call = [""] * 2
    for line in re.split(r"\n|(?=\[rank\d+\]:)", file.read_text(errors="replace")):
        rank = int(found[1]) if (found := re.search(r"[Rr]ank ?(\d+)\]", line)) else -1
        if found := TIMED_OUT.search(line):
            timed_out.setdefault(rank, [describe_call(found[1], int(found[2])), UNKNOWN])
        if found := STATUS.search(line):
            enqueued, completed = int(found[2]), int(found[3])
            calls = {completed + 1: timed_out[rank]} if rank in timed_out else {}
            yield found[1], rank, Record(enqueued, completed, calls)
        if "Stack trace of the failed collective:" in line:
            call = timed_out.get(rank, call)
        found = STACK_LINE.search(line)
        if found and call[1] == UNKNOWN and not LIBRARY.search(found[2]):
            call[1] = f"{found[2]}:{found[3]} in {found[1]}"


def read_dump(file: Path) -> Iterator[tuple[str, int, Record]]:
    """Yield what a flight recorder's dump says, with the group and the rank."""
    groups: dict[str, list[Any]] = {"0": []}  # every rank is in this group
    rank = re.search(r"\d+$", file.stem)
    try:
        with file.open("rb") as opened:
            entries = PlainUnpickler(opened).load()["entries"]
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        print(f"left out: {file} is not a complete dump: {error!r}", file=sys.stderr)
        return
    if not rank:
        print(f"left out: the name of {file} does not end with a rank", file=sys.stderr)
        return
    for entry in entries:
        if not entry.get("is_p2p"):
            groups.setdefault(entry["process_group"][0], []).append(entry)
    for group, its in groups.items():
        calls = {}
        for each in its:
            elements = sum(map(math.prod, each["input_sizes"]))
            call = describe_call(each["profiling_name"].rpartition(":")[2], elements)
            lines = [*map(describe, own(each.get("frames", []))), UNKNOWN]
            calls[each["collective_seq_id"]] = [call, lines[0]]
        enqueued = max(calls, default=0)
        # With Gloo, the dump's pg_status may lag behind the last collective that has completed.
        pending = [each["collective_seq_id"] for each in its if not each["retired"]]
        yield group, int(rank[0]), Record(enqueued, min(pending, default=enqueued + 1) - 1, calls)


def describe_call(kind: str, elements: int) -> str:
    kind = kind.replace("_", "").lower()  # a dump says all_reduce, a log ALLREDUCE
    return kind if kind in UNEVEN else f"{kind} of {elements} elements"


def last_calls(group: str, records: dict[int, Record]) -> Iterator[Rank]:
    """Yield where each rank of a group is, at its first call that not all ranks have completed."""
    number = max(0, min(each.completed for each in records.values())) + 1
    calls = [each.calls[number] for each in records.values() if number in each.calls]
    # A rank whose own record has lost this call gets the others' kind and size.
    lost = [calls[0][0] if calls else "a call", UNKNOWN]
    on_host = [*range(max(records) + 1)] if group == "0" else []
    for rank, record in records.items():
        last = Rank(f"process group {group}", rank, on_host)
        if record.enqueued >= number:
            call, line = record.calls.get(number, lost)
            yield last._replace(waits_in=f"collective {number}, {call}", place=line)
        else:
            before = f"has not called collective {number}; its last was {record.enqueued}"
            place = ", ".join(record.calls.get(record.enqueued, [UNKNOWN]))
            yield last._replace(state=before, place=place)


if __name__ == "__main__":
    main()
