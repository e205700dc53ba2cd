"""Train the small GPT in the reader's way and in PyTorch's, on the same batches."""

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from scripts.small_gpt import BLOCK_SIZE, GPT

from . import myddp
from .partners import open_impatient_group
from .record import Log

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


def gradient_of(model: nn.Module) -> Tensor:
    """Return a copy of the gradients of all weights as one vector, with 0 where there is none."""
    gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in model.parameters()]
    return nn.utils.parameters_to_vector(gradients).clone()


def with_steps(
    model: nn.Module, finish: Callable[[], Any] = lambda: None, make_optimizer: Any = AdamW
) -> Way:
    """Return a way that calls `finish` between backward and the optimizer's step."""
    optimizer = make_optimizer(model.parameters())

    def step(own: Batch) -> None:
        loss_of(model, own).backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()

    return Way(step, lambda: vector(model))


def with_ddp(make_optimizer: Any = AdamW, seed: int = 0, **options: Any) -> Way:
    """Return PyTorch's way: DDP, whose all-reduces are logged, too."""
    ddp = DDP(new_gpt(seed), gradient_as_bucket_view=True, **options)
    ddp.register_comm_hook(None, allreduce_hook)
    return with_steps(ddp, make_optimizer=make_optimizer)


def training(
    name: str, way: Callable[[Any], Way], torchs_way: Callable[[], Way]
) -> Callable[[Callable[..., Any]], list[float]]:
    """Return what takes the same steps with the reader's `name` and in PyTorch's way (collective).

    It returns how far the weights were apart after each step, relative to their norm.
    """

    def compare(function: Callable[..., Any]) -> list[float]:
        open_impatient_group()
        own, other, gaps = way(myddp.load(**{name: function})), torchs_way(), []
        for number in range(3):
            for each in (own, other):
                each.step(batch(number))
            wanted = other.weights()
            gaps.append(((own.weights() - wanted).norm() / wanted.norm()).item())
        dist.barrier()  # nobody leaves while a message is on its way
        return gaps

    return compare


def close(found: Tensor, wanted: Tensor) -> bool:
    """Return whether two vectors are equal up to rounding."""
    return bool((found - wanted).norm() <= 1e-4 * wanted.norm())


def hint_for(found: Tensor, wrong: list[tuple[Tensor, str]]) -> str | None:
    """Return the hint that belongs to the first wrong vector that `found` is close to."""
    return next((hint for vector, hint in wrong if close(found, vector)), None)


def judge_mean(found: Sequence[Tensor], own: Sequence[Tensor]) -> str | None:
    """Judge the gradients that the ranks end with: each should be the mean over the ranks.

    Args:
        found: The gradient of some weights, by rank.
        own: For each rank, all ranks' own gradients of the same weights: (ranks, weights).
    """
    for rank, (gradient, gradients) in enumerate(zip(found, own, strict=True)):
        total, ranks = gradients.sum(0), len(gradients)
        wrong = [
            (gradients[rank], "this rank's own. Average it, and not a copy"),
            (total, "the sum over the ranks. DDP takes the mean"),
            (total / ranks**2, "divided twice. Divide once, by the world size"),
            (total / 2, f"half of the sum, but here are {ranks} ranks: divide by the world size"),
            (0 * total, "missing"),
        ]
        if hint := hint_for(gradient, wrong):
            return f"rank {rank}'s gradient is {hint}"
        if not close(gradient, total / ranks):
            return f"rank {rank}'s gradient is not the mean over the ranks, or not everywhere"
    return None


def units_sent(log: Log, numbers: int) -> float:
    """Return what a rank has sent, in units: the (n - 1)/n of all bytes that a ring half sends."""
    n = dist.get_world_size()
    # What a call sends for each byte of its largest tensor. Gloo's reduce-scatter is an all-reduce.
    units = {"recv": 0, "all_gather": n, "all_gather_into_tensor": 1}
    units |= {"all_gather_object": n, "broadcast": 1, "reduce": 1}  # of a rank, on average
    units |= {"all_reduce": 2, "reduce_scatter": 2 * n, "reduce_scatter_tensor": 2}
    sent = sum(units.get(call.name, n / (n - 1)) * call.size for call in log.calls)
    return sent / (4 * numbers)


def judge_units(found: Sequence[float], wanted: Sequence[float]) -> str | None:
    """Judge how many units a rank has sent, in one or more passes."""
    if all(abs(units - right) < 0.05 for units, right in zip(found, wanted, strict=True)):
        return None
    sent, enough = (" and ".join(f"{each:.1f}" for each in passes) for passes in (found, wanted))
    return (
        f"right, but a rank sends {sent} units, and {enough} would do. An all-reduce takes 2, "
        "and so does Gloo's reduce-scatter; your ring's halves take 1 each"
    )


def bytes_held() -> int:
    """Return the bytes of all tensors of this process that Python knows."""
    gc.collect()
    # A DTensor only describes its local tensor, and a meta tensor (address 0) has no memory.
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for address, storage in memory.items() if address)
