"""Train the small GPT in the reader's way and in PyTorch's, on the same batches."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from scripts.small_gpt import BLOCK_SIZE, GPT

from .record import Log, recorded

CHARACTERS = 100
WEIGHTS = 115_456
Batch = tuple[Tensor, Tensor]  # inputs and targets, (rows, BLOCK_SIZE)


class Way(NamedTuple):
    """A way to train: what takes a step, and what returns all weights as one vector."""

    step: Callable[[Batch], None]
    weights: Callable[[], Tensor]


class Prediction(NamedTuple):
    """What the cost model says about a step: two times in seconds, and the bytes a rank sends."""

    compute: float
    exposed: float
    sent: float


class Seen(NamedTuple):
    """The weights after each step in both ways, and what the reader's last step sent."""

    own: list[Tensor]
    torchs: list[Tensor]
    log: Log


def new_gpt(seed: int = 0) -> GPT:
    """Return the GPT of scripts/small_gpt.py: 115,456 weights in 15 tensors."""
    torch.manual_seed(seed)
    return GPT(CHARACTERS)


def batch(step: int, rows: int = 4) -> Batch:
    """Return this rank's rows of a step's batch: random characters."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    ids = torch.randint(CHARACTERS, (rows, BLOCK_SIZE + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """Return the mean or the sum of the losses of a batch."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)


def vector(model: nn.Module) -> Tensor:
    """Return a copy of all weights as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def with_ddp(make_optimizer: Any = torch.optim.AdamW, seed: int = 0, **options: Any) -> Way:
    """Return PyTorch's way: DDP, whose all-reduces are logged, too."""
    model = new_gpt(seed)
    ddp = DDP(model, gradient_as_bucket_view=True, **options)
    ddp.register_comm_hook(None, allreduce_hook)
    optimizer = make_optimizer(model.parameters())

    def step(own: Batch) -> None:
        loss_of(ddp, own).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Way(step, lambda: vector(model))


def compare(reader: Callable[[], Way], torchs: Callable[[], Way], steps: int = 3) -> Seen:
    """Take the same steps in both ways (collective)."""
    own, its = [], []
    way, other = reader(), torchs()
    for number in range(steps):
        with recorded() as log:
            way.step(batch(number))
        own.append(way.weights())
        other.step(batch(number))
        its.append(other.weights())
    return Seen(own, its, log)


def bytes_held() -> int:
    """Return the bytes of all tensors of this process that Python knows."""
    gc.collect()
    # A DTensor only describes its local tensor, and a meta tensor (address 0) has no memory.
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for address, storage in memory.items() if address)
