"""Stage 4 of myddp.py: gradients in buckets, whose all-reduces run beside backward."""

import time
from bisect import bisect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, myddp, trial
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
RESET = "The first step was right, but the second was not. What must finish() reset?"


class Step(NamedTuple):
    """What a step of the reader's sent on this rank, and its gradients before and after."""

    sizes: tuple[int, ...]  # bytes of each collective
    starts: list[int]  # how many gradients were ready when it began
    waited: bool  # during backward
    own: Tensor  # all gradients as a vector
    after: Tensor


class Trained(NamedTuple):
    """The steps of two models, the bytes of DDP's buckets of the first, and the small GPT."""

    layers: list[Step]
    torchs: tuple[int, ...]
    branches: list[Step] | None  # None: a rank waited for an all-reduce that never came
    gpt: trial.Seen


class Branches(nn.ModuleList):
    """Branches that rank 1 computes in the opposite order, so their gradients are ready in it."""

    def forward(self, inputs: Tensor) -> Tensor:
        order = self if dist.get_rank() == 0 else reversed(self)
        return torch.stack([branch(inputs) for branch in order]).square()


def way(own: Any) -> trial.Way:
    """Train with the reader's buckets."""
    model = trial.new_gpt()
    optimizer, buckets = torch.optim.AdamW(model.parameters()), own.Buckets(model, CAP)

    def step(mine: trial.Batch) -> None:
        trial.loss_of(model, mine).backward()
        buckets.finish()
        optimizer.step()
        optimizer.zero_grad()

    return trial.Way(step, lambda: trial.vector(model))


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


def _take_two_steps(make: Callable[..., Any], model: nn.Module, cap: int) -> list[Step]:
    parameters, ready, steps = [*model.parameters()], list[float](), []
    for parameter in parameters:  # before the reader's hooks
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.perf_counter()))
    buckets = make(model, cap)
    for number in range(2):
        inputs = torch.full((4, WIDTHS[0]), 1.0 + number + dist.get_rank())
        own = torch.autograd.grad(model(inputs).square().sum(), parameters)  # calls no hooks
        ready.clear()
        with recorded() as log:
            try:
                model(inputs).square().sum().backward()
                buckets.finish()
            except (AttributeError, LookupError, TypeError) as error:
                raise (RuntimeError(f"{error}. {RESET}") if number else error) from None
        starts = [bisect(ready, call.start) for call in log.calls]
        waited = any(start < ready[-1] for start, _ in log.waits)
        after = [parameter.grad for parameter in parameters if parameter.grad is not None]
        vectors = [torch.cat([each.flatten() for each in tensors]) for tensors in (own, after)]
        steps.append(Step(tuple(call.size for call in log.calls), starts, waited, *vectors))
        model.zero_grad()
    return steps


def _train(make: Callable[..., Any]) -> Trained:
    open_impatient_group()
    layers, torchs = _take_two_steps(make, _layers(), SMALL_CAP), _sizes_of_ddp()
    gpt, branches = trial.compare(lambda: way(myddp.load(Buckets=make)), torchs_way), None
    torch.manual_seed(0)
    model = Branches([nn.Linear(WIDTHS[0], 8, bias=False) for _ in range(3)])
    try:
        branches = _take_two_steps(make, model, cap=1)
        dist.barrier()  # a rank waits here if the other one has sent more
    except RuntimeError as error:
        if not has_no_partner(error):
            raise
    return Trained(layers, torchs, branches, gpt)


def _judge(ranks: list[Trained]) -> str | None:
    first, second = zip(*[rank.layers for rank in ranks], strict=True)
    torchs, seen, branches = ranks[0].torchs, ranks[0].gpt, [rank.branches for rank in ranks]
    if hint := _judge_layers(first, torchs):
        return hint
    if _judge_layers(second, torchs):
        return RESET
    if None in branches or {len(step.sizes) for own in branches for step in own or ()} != {3}:
        return (
            "the ranks wait for each other if their gradients are ready in different orders. When "
            "the first bucket is complete, how many others may have been waiting for their turn?"
        )
    if not all(_has_mean(steps) for steps in zip(*branches, strict=True)):
        return (
            "with branches that rank 1 computes in the opposite order, the ranks add gradients of "
            "different parameters. Which bucket may be sent next?"
        )
    if sum(call.size for call in seen.log.calls) != gradient_bytes(trial.WEIGHTS):
        return "the small GPT has to send each of its gradients once"
    if not all(map(torch.equal, seen.own, seen.torchs)):
        return "after three steps, the small GPT's weights are not those of DDP"
    return None


def _has_mean(ranks: Any) -> bool:
    mean = (ranks[0].own + ranks[1].own) / 2
    return all(torch.equal(rank.after, mean) for rank in ranks)


def _judge_layers(ranks: Any, torchs: tuple[int, ...]) -> str | None:
    sizes, starts, _, own, after = ranks[0]
    total = ranks[0].own + ranks[1].own
    slip = SLIPS.get(sizes, "A bucket is full as soon as it holds `cap` bytes or more")
    packed = f"with a cap of {SMALL_CAP} bytes, your all-reduces have {sizes} bytes, and DDP's "
    begun = f"your all-reduces start when {starts} of {STARTS[-1]} gradients are ready, and DDP's "
    hints = {
        "no all-reduce was called, as if no bucket were ever complete. Does each hook know the "
        "number of its own bucket?": not sizes,
        f"{packed}{torchs}. {slip}": sizes != torchs,
        "a hook waits for an all-reduce, and backward stands still meanwhile, so nothing overlaps. "
        "Where do you need the sums for the first time?": any(rank.waited for rank in ranks),
        f"{begun}at {STARTS}. A bucket that waits for later gradients does not overlap with "
        "backward": starts != STARTS,
        "finish() leaves this rank's own gradients in .grad": torch.allclose(after, own),
        "the gradients are the sum over the ranks, not the mean": torch.allclose(after, total),
        "the gradients are half of the mean. Divide once": torch.allclose(after, total / 4),
        "some gradients are not the mean over the ranks. Does each parameter get its own piece of "
        "the bucket?": not _has_mean(ranks),
    }
    return next((hint for hint, wrong in hints.items() if wrong), None)


EXERCISES = {"Buckets": Exercise(_train, _judge, timeout=40)}
