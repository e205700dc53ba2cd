"""Stage 4 of myddp.py: gradients in buckets, whose all-reduces run beside backward."""

import time
from bisect import bisect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, trial
from lesson.cost_model import Link, bytes_sent, gradient_bytes, predict_step
from lesson.partners import has_no_partner, open_impatient_group
from lesson.record import recorded
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

CAP = 90_000  # bytes: four buckets of the small GPT's gradients
WIDTHS, SMALL_CAP = (2, 16, 8, 8, 24, 8), 800  # the first bucket has 800 bytes exactly
STARTS = [2, 4, 8, 10]  # how many gradients are ready when DDP starts its buckets
SLIPS = {  # by the bytes of the buckets that a mistake makes of these layers
    (992, 800, 864, 32): "Yours begin with the first layers, whose gradients are ready last",
    (800, 96, 800, 800, 192): "Yours never exceed the cap. DDP does not look ahead: it adds a "
    "gradient first, and then asks whether the bucket is full",
    (896, 1056, 736): "A bucket is full as soon as it has reached the cap, not only above it",
    (800, 864, 832): "Your last bucket is not full, but it has to be sent, too",
}


class Step(NamedTuple):
    """What a step of the reader's sent on this rank, and its gradients before and after."""

    sizes: tuple[int, ...]  # bytes of each collective
    starts: list[int]  # how many gradients were ready when it began
    waited: bool  # during backward
    own: Tensor
    after: Tensor


class Trained(NamedTuple):
    """The steps of two models, and the bytes of DDP's buckets of the first."""

    layers: Step
    torchs: tuple[int, ...]
    branches: Step | None  # None: a rank waited for an all-reduce that never came
    pairs: Step | None  # the same, with two gradients in the first bucket


class Branches(nn.ModuleList):
    """Branches that rank 0 computes in the opposite order, so their gradients are ready in it."""

    def forward(self, inputs: Tensor) -> Tensor:
        order = reversed(self) if dist.get_rank() == 0 else self
        return torch.stack([branch(inputs) for branch in order]).square()


def way(own: Any) -> trial.Way:
    """Train with the reader's buckets."""
    model = trial.new_gpt()
    return trial.with_steps(model, own.Buckets(model, CAP).finish)


def torchs_way() -> trial.Way:
    return trial.with_ddp(bucket_cap_mb=CAP / 2**20)


def predict(forward: float, backward: float, link: Link) -> trial.Prediction:
    payload = gradient_bytes(trial.WEIGHTS)
    step = predict_step(forward, backward, payload, CAP, 2, link.bandwidth, link.latency)
    return trial.Prediction(forward + backward, step.exposed, bytes_sent(payload, 2))


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(*sizes) for sizes in pairwise(WIDTHS)])


def _sizes_of_ddp() -> tuple[int, ...]:
    """Return the bytes of DDP's all-reduces in its second step, which has the final buckets."""
    ddp = DDP(_layers(), bucket_cap_mb=SMALL_CAP / 2**20)
    ddp.register_comm_hook(None, allreduce_hook)
    for _ in range(2):
        with recorded() as log:
            ddp(torch.ones(2, WIDTHS[0])).sum().backward()
    return tuple(call.size for call in log.calls)


def _take_a_step(make: Callable[..., Any], model: nn.Module, cap: int) -> Step:
    ready: list[float] = []
    for parameter in model.parameters():  # before the reader's hooks
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.perf_counter()))
    inputs = torch.full((4, WIDTHS[0]), 1.0 + dist.get_rank())
    model(inputs).square().sum().backward()
    own = trial.gradient_of(model)
    model.zero_grad()
    buckets = make(model, cap)
    ready.clear()
    with recorded() as log:
        model(inputs).square().sum().backward()
        buckets.finish()
    starts = [bisect(ready, call.start) for call in log.calls]
    waited = any(start < ready[-1] for start, _ in log.waits)
    sizes = tuple(call.size for call in log.calls)
    return Step(sizes, starts, waited, own, trial.gradient_of(model))


def _train(make: Callable[..., Any]) -> Trained:
    open_impatient_group()
    layers, torchs = _take_a_step(make, _layers(), SMALL_CAP), _sizes_of_ddp()
    try:
        branches, pairs = (_branch_off(make, cap) for cap in (1, 100))  # 64 bytes each
    except RuntimeError as error:
        if not has_no_partner(error):
            raise
        return Trained(layers, torchs, None, None)
    return Trained(layers, torchs, branches, pairs)


def _branch_off(make: Callable[..., Any], cap: int) -> Step:
    torch.manual_seed(0)
    model = Branches([nn.Linear(WIDTHS[0], 8, bias=False) for _ in range(4)])
    step = _take_a_step(make, model, cap)
    dist.barrier()  # a rank waits here if another one has sent more
    return step


def _judge(ranks: list[Trained]) -> str | None:
    (sizes, starts, *_), torchs, *_ = ranks[0]
    layers, branches = [rank.layers for rank in ranks], [rank.branches for rank in ranks]
    if not sizes:
        return (
            "no all-reduce was called, as if no bucket were ever complete. Does each hook know the "
            "number of its own bucket?"
        )
    if sizes != torchs:
        slip = SLIPS.get(sizes, "A bucket is full as soon as it holds `cap` bytes or more")
        return (
            f"with a cap of {SMALL_CAP} bytes, your all-reduces have {sizes} bytes, and DDP's "
            f"{torchs}. {slip}"
        )
    if any(step.waited for step in layers):
        return (
            "a hook waits for an all-reduce, and backward stands still meanwhile, so nothing "
            "overlaps. Where do you need the sums for the first time?"
        )
    if starts != STARTS:
        return (
            f"your all-reduces start when {starts} of {STARTS[-1]} gradients are ready, and DDP's "
            f"at {STARTS}. A bucket that waits for later gradients does not overlap with backward"
        )
    if hint := _judge_means(layers):
        return f"after finish(), {hint}. Does each parameter get its own piece of the bucket?"
    if None in branches or {len(step.sizes) for step in branches if step} != {4}:
        return (
            "the ranks wait for each other if their gradients are ready in different orders. When "
            "the first bucket is complete, how many others may have been waiting for their turn?"
        )
    if _judge_means(branches):
        return (
            "with branches that rank 0 computes in the opposite order, the ranks add gradients of "
            "different parameters. Which bucket may be sent next?"
        )
    if _judge_means([rank.pairs for rank in ranks]):
        return (
            "two gradients of one bucket are ready in another order on rank 0, and then the ranks "
            "add different ones: pack them in the bucket's order, not in that of the hooks"
        )
    return None


def _judge_means(ranks: Any) -> str | None:
    own = torch.stack([step.own for step in ranks])
    return trial.judge_mean([step.after for step in ranks], [own] * len(own))


EXERCISES = {
    "Buckets": Exercise(_train, _judge, nproc=3, train=trial.training("Buckets", way, torchs_way))
}
