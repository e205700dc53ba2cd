"""`Handler.save` against a bare `torch.save` and fsync of the same state.

Rank 0 writes 128 MiB into a new file while the other rank waits. `Handler` also gathers the random
states of all ranks, checks that the weights are finite, renames the file and syncs the folder.
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from page import BUILD
from side_by_side import AGAIN, Times, compare, side_by_side, together
from tables import Table, goal
from torch import nn
from torch.utils.data import TensorDataset

from ddp_ref import Handler, initialize_ddp, run_ranks

ROUNDS = 150
WIDTH, LAYERS = 2048, 4  # 64 MiB of weights, as much of momentum
BARE, OURS = "torch.save and fsync", "Handler.save"


def measure(rounds: int) -> list[Table]:
    BUILD.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        rows = compare(run_ranks(times_on_rank, Path(folder), rounds)[0])
    ours = next(row for row in rows if row.name == OURS)
    speed = f"{1 / ours.ratio:.0%}"
    reached = goal("at least 90% of the baseline's speed", speed, ours.at_most(1 / 0.9))
    return [Table("a checkpoint", rows, [reached])]


def times_on_rank(folder: Path, rounds: int) -> Times:
    info = initialize_ddp()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    handler = Handler(model, optimizer, F.mse_loss)
    inputs = torch.ones(4, WIDTH)
    handler.set_train_loader(TensorDataset(inputs, inputs), 2)
    handler.train(1)
    paths = (folder / f"{number}.pt" for number in count())

    def bare(path: Path) -> None:
        if info.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with path.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def to_a_new_file(save: Callable[[Path], None]) -> float:
        path = next(paths)
        seconds = together(partial(save, path))()
        if info.rank == 0:
            path.unlink()
        return seconds

    saves = {BARE: bare, BARE + AGAIN: bare, OURS: handler.save}
    variants = {name: partial(to_a_new_file, save) for name, save in saves.items()}
    return side_by_side(variants, rounds)
