"""`on_rank` against a bare barrier.

Rank 0 runs a function that does nothing while the other rank waits in the barrier or in `on_rank`.
"""

import torch.distributed as dist
from side_by_side import AGAIN, Times, compare, side_by_side, timed
from tables import Table

from ddp_ref import initialize_ddp, on_rank, run_ranks

ROUNDS, CALLS = 600, 20
BASE = "if rank == 0, barrier"


def measure(rounds: int) -> list[Table]:
    return [Table("a call", compare(run_ranks(times_on_rank, rounds)[0]))]


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
