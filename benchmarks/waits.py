"""`on_rank` against a bare barrier, and `run_ranks` against `mp.spawn`.

Rank 0 runs a function that does nothing while the other rank waits in the barrier or in `on_rank`.
In the second table, two ranks start, open a process group and end.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
import torch.multiprocessing as mp
from side_by_side import AGAIN, Times, compare, side_by_side, timed
from tables import Table

from ddp_ref import initialize_ddp, on_rank, run_ranks

ROUNDS, CALLS = 600, 20
BASE, SPAWN = "if rank == 0, barrier", "mp.spawn"


def measure(rounds: int) -> list[Table]:
    calls = run_ranks(times_on_rank, rounds)[0]
    starts = side_by_side(
        {
            SPAWN: timed(spawn),
            SPAWN + AGAIN: timed(spawn),
            "run_ranks": timed(partial(run_ranks, dist.init_process_group, "gloo")),
        },
        max(1, rounds // 50),
    )
    return [Table("a call", compare(calls)), Table("two ranks", compare(starts))]


def spawn() -> None:
    with TemporaryDirectory() as folder:
        mp.spawn(join, (Path(folder) / "store",), nprocs=2)


def join(rank: int, file: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)


def times_on_rank(rounds: int) -> Times:
    info = initialize_ddp()

    def nothing() -> int:
        return 0

    def bare() -> None:
        if info.rank == 0:
            nothing()
        dist.barrier()

    variants = {
        BASE: bare,
        BASE + AGAIN: bare,
        "on_rank(0)": on_rank(0)(nothing),
        "on_rank(0, broadcast=True)": on_rank(0, broadcast=True)(nothing),
    }
    return side_by_side({name: timed(work, CALLS) for name, work in variants.items()}, rounds)
