"""Stage 3 of myddp.py: one optimizer step for all tokens of all microbatches of all ranks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, trial
from lesson.cost_model import Link, gradient_bytes
from lesson.partners import open_impatient_group
from lesson.record import Log, recorded
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from scripts.small_gpt import BLOCK_SIZE

from . import stage_2

# For each rank and microbatch: how many targets of a row count. The others are -100.
COUNTED = (64, 16, 32), (8, 0, 24), (40, 4, 0)
SCALE, LIMIT = 65536.0, 0.1
SUMMED = partial(trial.loss_of, reduction="sum")


def _microbatches(rows: trial.Batch, counted: Sequence[int]) -> list[trial.Batch]:
    inputs, targets = rows
    return [
        (inputs.roll(k, 1), targets.roll(k, 1).where(torch.arange(BLOCK_SIZE) < count, -100))
        for k, count in enumerate(counted)
    ]


def _train(token_step: Callable[..., Any], model: nn.Module) -> trial.Way:
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")

    def step(mine: trial.Batch) -> None:
        microbatches = _microbatches(mine, COUNTED[dist.get_rank()])
        token_step(model, optimizer, scaler, microbatches, SUMMED, LIMIT)

    return trial.Way(step, lambda: trial.vector(model))


def way(own: Any) -> trial.Way:
    """Train in the reader's way: three microbatches in a step, each as large as stage 2's batch."""
    return _train(own.token_step, trial.new_gpt())


def torchs_way() -> trial.Way:
    return _train(_with_ddp, DDP(trial.new_gpt(), gradient_as_bucket_view=True))


def _with_ddp(
    model: Any, optimizer: Any, scaler: Any, parts: list[trial.Batch], loss_of: Any, limit: float
) -> None:
    count = torch.stack([(targets != -100).sum() for _, targets in parts]).sum()
    dist.all_reduce(count)
    for number, part in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else model.no_sync():
            scaler.scale(loss_of(model, part) * dist.get_world_size() / count).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def predict(forward: float, backward: float, link: Link) -> trial.Prediction:
    compute, exposed, sent = stage_2.predict(forward, backward, link)
    return trial.Prediction(3 * compute, exposed + link.latency, sent)  # and the count's all-reduce


class Step(NamedTuple):
    """What a rank's step should have used, and what it did.

    sums: the gradient of each microbatch's loss. used: the gradients that the optimizer got.
    calls: of forward (f) and backward (b).
    """

    sums: Tensor
    used: list[Tensor]
    calls: str
    log: Log
    scale: float
    zeros: bool  # in place of gradients that are None, afterwards


def _step(token_step: Any, counted: Sequence[int], limit: float, factor: float = 1.0) -> Step:
    """Take one step with the reader's function (collective)."""
    model, used, calls, sums = trial.new_gpt(), list[Tensor](), list[str](), []
    for part in (parts := _microbatches(trial.batch(0, rows=1), counted)):
        SUMMED(model, part).backward()
        sums.append(trial.gradient_of(model))
        model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: used.append(trial.gradient_of(model)))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def watched(model: nn.Module, part: trial.Batch) -> Tensor:
        total = SUMMED(model, part) * factor
        calls.append("f")
        total.register_hook(lambda _: calls.append("b"))
        return total

    with recorded() as log:
        token_step(model, optimizer, scaler, parts, watched, limit)
    zeros = all(w.grad is not None and not w.grad.any() for w in model.parameters())
    return Step(torch.stack(sums), used, "".join(calls), log, scaler.get_scale(), zeros)


def _take_steps(token_step: Callable[..., Any]) -> list[Step]:
    """Take a step without and with clipping, with infinity, and with a rank of no tokens."""
    open_impatient_group()
    rank = dist.get_rank()
    return [
        _step(token_step, COUNTED[rank], limit=1e9),
        _step(token_step, COUNTED[rank], LIMIT),
        _step(token_step, COUNTED[rank], LIMIT, factor=torch.inf if rank == 1 else 1.0),
        _step(token_step, (0, 0) if rank == 1 else (5, 7), limit=1e9),
    ]


def _judge(ranks: list[list[Step]]) -> str | None:
    plain, clipped, infinite, empty = map(list, zip(*ranks, strict=True))
    if not all(step.used for step in [*plain, *clipped]):
        return "the optimizer took no step. Call scaler.step; it skips gradients that are NaN"
    (used, *others), small = [step.used[0] for step in plain], clipped[0].used[0]
    if not all(torch.equal(used, other) for other in others):
        return "the ranks step with different gradients: average them after the last backward"
    sums, counts = torch.stack([step.sums for step in plain]), torch.tensor(COUNTED)
    total, last = sums.sum((0, 1)), sums[:, -1].sum(0)
    mean, own = total / counts.sum(), (sums.sum(1) / counts.sum(1, keepdim=True)).sum(0)
    each = (sums / counts.clamp(min=1)[..., None]).sum((0, 1))
    wrong = [
        (own / 3, "each rank's mean has the same weight: divide by all ranks' tokens"),
        (each / 9, "each microbatch's mean has the same weight: divide by all ranks' tokens"),
        (mean / 3, "a third of what they should be. The average divides by the 3 ranks as well"),
        (mean * 2 / 3, "made for two ranks, and here are 3: ask for the world size"),
        (total / 3, "averaged over the ranks, but not divided by the number of tokens"),
        (total / counts.numel() / BLOCK_SIZE, "divided by all targets: do not count -100"),
        (mean * SCALE, "still multiplied by the scale: unscale them, and call scaler.step"),
        (last / counts.sum(), "those of the last microbatch alone: do not zero the others"),
    ]
    if hint := trial.hint_for(used, wrong):
        return f"the gradients are wrong: {hint}"
    if not trial.close(used, mean):
        return "below the limit, the gradient is not that of the mean over all tokens of all ranks"
    if "ff" in plain[0].calls:
        return "two microbatches were in memory at once. Call backward before the next forward"
    sizes = [call.size for call in plain[0].log.calls]
    if (
        len(sizes) > stage_2.TENSORS + 1
        or not 0 <= sum(sizes) - gradient_bytes(trial.WEIGHTS) <= 64
    ):
        return (
            f"your step made {len(sizes)} collective calls, of {sum(sizes):,} bytes. All it needs "
            "is one for the count, and the average of the gradients after the last microbatch"
        )
    if trial.close(small * SCALE, mean * LIMIT / mean.norm()):
        return "you clipped the gradient while it was still multiplied by the scale"
    if not trial.close(small, mean * LIMIT / mean.norm()):
        return (
            f"with the limit {LIMIT}, the gradient has the norm {small.norm():.2f}, or points in "
            "another direction than the mean: clip its norm once, when the mean is complete"
        )
    if any(step.scale != SCALE for step in [*plain, *clipped]):
        return "all gradients were finite, but the scale has changed: call scaler.update()"
    if any(step.used or step.scale == SCALE for step in infinite):
        return (
            "an infinite gradient of rank 1 reached the weights, or left the scale as it was. "
            "scaler.unscale_ has to look for it in the mean, scaler.step to skip the step, and "
            "scaler.update to lower the scale"
        )
    wanted = torch.stack([step.sums for step in empty]).sum((0, 1)) / 24
    if not empty[0].used or not trial.close(empty[0].used[0], wanted):
        return "it is right, but not with 2 microbatches, or not if a rank has no tokens"
    if any(step.zeros for step in plain):
        return "right, but it leaves gradients of zeros in memory: they must be None afterwards"
    return None


EXERCISES = {
    "token_step": Exercise(
        _take_steps, _judge, nproc=3, train=trial.training("token_step", way, torchs_way)
    )
}
