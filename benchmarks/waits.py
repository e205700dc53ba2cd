"""`on_rank` against a bare barrier.

Rank 0 runs a function that does nothing while the other rank waits in the barrier or in `on_rank`.
"""

import torch.distributed as dist
from side_by_side import AGAIN, compare, side_by_side, timed
from tables import Table

from ddp_ref import initialize_ddp, on_rank, run_ranks

ROUNDS, RANKS, CALLS = 600, 2, 20
BASE = "if rank == 0, barrier"


def measure(rounds: int) -> list[Table]:
    times = run_ranks(times_on_rank, rounds, nproc=RANKS)[0]
    return [Table("a call", compare(times, BASE), [])]


def times_on_rank(rounds: int) -> dict[str, list[float]]:
    info = initialize_ddp()

    def nothing() -> int:
        return 0

    def bare() -> None:
        if info.rank == 0:
            nothing()
        dist.barrier()

    variants = {
        BASE: timed(bare, CALLS),
        BASE + AGAIN: timed(bare, CALLS),
        "on_rank(0)": timed(on_rank(0)(nothing), CALLS),
        "on_rank(0, broadcast=True)": timed(on_rank(0, broadcast=True)(nothing), CALLS),
    }
    return side_by_side(variants, rounds)
