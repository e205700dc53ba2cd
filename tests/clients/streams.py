"""Train on a stream of unknown length, which ends earlier on some ranks than on others."""

from itertools import islice

import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from ddp_ref import Handler, cleanup_ddp, initialize_ddp

LINES = 110


def read():
    """Yield what a file or a queue would give: a number, and twice that number."""
    for number in range(LINES):
        yield torch.tensor([number / LINES]), torch.tensor([2 * number / LINES])


class Lines(IterableDataset):
    """Every line once: each worker of each rank takes every n-th."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        worker = get_worker_info()
        workers, own = (worker.num_workers, worker.id) if worker else (1, 0)
        first = own * self.world_size + self.rank
        return islice(read(), first, None, self.world_size * workers)


def train(epochs=5, steps_per_epoch=20):
    info = initialize_ddp()
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    handler = Handler(model, optimizer, nn.functional.mse_loss)
    handler.set_train_loader(
        Lines(info.rank, info.world_size),
        batch_size=4,
        steps_per_epoch=steps_per_epoch,  # optimizer steps on every rank
        num_workers=2,
        drop_last=True,  # so that every batch has 4 lines
    )
    handler.train(epochs)
    return handler


if __name__ == "__main__":
    handler = train()
    if handler.rank == 0:
        print("losses:", [round(loss, 4) for loss in handler.train_losses])
    cleanup_ddp()
