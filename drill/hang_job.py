"""A small DDP job that hangs on purpose, or that is only slow. hangs.py runs it.

    python drill/hang_job.py frozen_read spawn 3 1    # in an empty folder: rank 1 of 3 hangs

The launcher is spawn, run_ranks or torchrun, which starts this file once for each rank.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from random import randrange

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddp_ref import Handler, initialize_ddp, on_rank, reduce_sum, run_ranks


def hang(case: str) -> None:
    """Do what the odd rank does while the others go on."""
    match case:
        case "frozen_read":
            Path("pipe").read_text()
        case "endless_loop":
            done = False
            while not done:
                pass
        case "stopped_process":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stuck_in_kernel":
            opening = os.POSIX_SPAWN_OPEN, 3, "pipe", os.O_RDONLY, 0
            os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[opening])
        case "blocked_worker":
            next(iter(DataLoader(Items("frozen_read"), num_workers=1)))
        case "async_wait" | "reduce_sum" | "functional" | "handler_validation" | "handler_on_rank":
            time.sleep(3600)


class Items(IterableDataset[int]):
    """Samples that are slow, or that a DataLoader's worker never delivers."""

    def __init__(self, case: str) -> None:
        self.case = case

    def __iter__(self) -> Iterator[int]:
        while True:
            Path("worker").touch()
            hang(self.case)
            time.sleep(1)
            yield 0


def disagree(case: str, odd: bool, step: Callable[[], None]) -> None:
    """Do what all ranks do if the odd rank takes another way."""
    match case:
        case "other_branch":
            if not odd:
                step()
        case "skipped_call" | "validation_metric":
            if odd == (case == "validation_metric"):
                dist.all_reduce(torch.ones(1))
        case "swallowed_exception":
            for number in range(3):
                with suppress(ValueError):
                    if odd and number == 1:
                        raise ValueError("a bad batch")
                    step()
        case _:
            return
    dist.barrier()


def wait_for_odd(case: str) -> None:
    """Do what the other ranks do if the odd rank hangs."""
    match case:
        case "async_wait":
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        case "reduce_sum":
            reduce_sum({"loss": 1.0})
        case "functional":
            everyone = [*range(dist.get_world_size())]
            functional.all_reduce(torch.ones(1), "sum", everyone).item()


def run_handler(rank: int, case: str, size: int, odd_rank: int) -> None:
    """Let the odd rank hang in a metric, when it validates; or all ranks in its `on_rank`."""
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(number) for name, number in launch.items()}
    initialize_ddp()

    def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            arrive(rank)
            if case == "handler_on_rank":
                on_rank(odd_rank)(hang)(case)
            elif rank == odd_rank:
                hang(case)
        return (output.argmax(1) == target).float().mean()

    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = Handler(model, optimizer, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy})
    data = TensorDataset(torch.ones(64, 8), torch.zeros(64, dtype=torch.long))
    handler.set_train_loader(data, 8)
    handler.set_val_loader(data, 8)
    handler.train(sys.maxsize)


def be_slow(case: str, odd: bool, number: int, batches: Iterator[int]) -> None:
    """Do what all ranks do before each step of a healthy job."""
    if case == "on_rank_work":
        on_rank(0)(time.sleep)(1)
    elif case == "checkpoint":
        time.sleep(odd)
        dist.barrier()
    elif case == "slow_loader" and odd:
        next(batches)
    elif case == "changing_work" and odd:
        end = time.monotonic() + 8
        while time.monotonic() < end:
            add_up(randrange(100))
    elif odd and not (case == "short_validation" and number % 3):
        time.sleep({"straggler": 1, "short_validation": 2}.get(case, 0))


def add_up(depth: int) -> int:
    return add_up(depth - 1) + 1 if depth else sum(range(10**6))


def run_rank(number: int, case: str, size: int, odd_rank: int) -> None:
    rank = int(os.environ.get("RANK", number))  # mp.spawn passes it
    odd = rank == odd_rank
    threading.Thread(target=dump_when_told, args=[rank], daemon=True).start()
    if case.startswith("handler"):
        run_handler(rank, case, size, odd_rank)
    if case == "late_start":
        arrive(rank)
        time.sleep(3 if odd else 0)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = DDP(nn.Linear(8, 8))
    slow = odd and case == "slow_loader"
    batches: Iterator[int] = iter(DataLoader(Items(case), num_workers=1) if slow else [])

    def step() -> None:
        with model.no_sync() if case == "accumulation" and done % 4 else nullcontext():
            model(torch.ones(1, 8)).sum().backward()

    for done in range(sys.maxsize):
        if done == 3:
            arrive(rank)
            disagree(case, odd, step)
            if odd:
                hang(case)
            else:
                wait_for_odd(case)
        be_slow(case, odd, done, batches)
        step()


def arrive(rank: int) -> None:
    """Tell the drill that this rank is where the job hangs, if it does."""
    Path(f"rank_{rank}").touch()


def dump_when_told(rank: int) -> None:
    while not Path("dump_now").exists():
        time.sleep(0.1)
    file = Path(f"dump_of_{rank}")
    file.write_bytes(torch._C._distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    file.rename(f"dumps/rank_{rank}")


if __name__ == "__main__":
    launcher, job = sys.argv[2], (sys.argv[1], int(sys.argv[3]), int(sys.argv[4]))
    if launcher == "spawn":
        mp.spawn(run_rank, job, nprocs=job[1])
    elif launcher == "run_ranks":
        run_ranks(run_rank, 0, *job, nproc=job[1])
    else:
        run_rank(0, *job)
