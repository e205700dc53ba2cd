"""Stage 3 of myddp.py: one optimizer step for all tokens of all microbatches of all ranks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise
from lesson.cost_model import Link, bucketed_all_reduce_seconds, bytes_sent, gradient_bytes
from lesson.partners import open_impatient_group
from lesson.record import Log, recorded
from lesson.trial import WEIGHTS, Batch, Prediction, Way, batch, compare, loss_of, new_gpt, vector
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_ref import run_ranks
from scripts.small_gpt import BLOCK_SIZE

# For each rank and microbatch: how many targets of a row count. The others are -100.
COUNTED = (64, 16, 32), (8, 0, 24), (40, 4, 0)
TENSORS, SCALE, LIMIT = 15, 65536.0, 0.1
PATIENCE = timedelta(minutes=1)
NO_BACKWARD = "a rank has not called backward. It must, even if none of its tokens count"
SUMMED = partial(loss_of, reduction="sum")


def _microbatches(rows: Batch, counted: Sequence[int]) -> list[Batch]:
    inputs, targets = rows
    return [
        (inputs.roll(k, 1), targets.roll(k, 1).where(torch.arange(BLOCK_SIZE) < count, -100))
        for k, count in enumerate(counted)
    ]


def _train(token_step: Callable[..., Any], model: nn.Module) -> Way:
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")

    def step(mine: Batch) -> None:
        microbatches = _microbatches(mine, COUNTED[dist.get_rank()])
        token_step(model, optimizer, scaler, microbatches, SUMMED, LIMIT)

    return Way(step, lambda: vector(model))


def way(own: Any) -> Way:
    """Train in the reader's way: three microbatches in a step, each as large as stage 2's batch."""
    return _train(own.token_step, new_gpt())


def torchs_way() -> Way:
    return _train(_with_ddp, DDP(new_gpt(), gradient_as_bucket_view=True))


def _with_ddp(
    model: Any, optimizer: Any, scaler: Any, parts: list[Batch], loss_of: Any, limit: float
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


def predict(forward: float, backward: float, link: Link) -> Prediction:
    payload = gradient_bytes(WEIGHTS)
    seconds = bucketed_all_reduce_seconds(payload, TENSORS, 2, link.bandwidth, link.latency)
    # The all-reduce of the count pays the latency alone.
    return Prediction(3 * (forward + backward), seconds + link.latency, bytes_sent(payload, 2))


class Step(NamedTuple):
    """What a rank's step should have used, and what it did.

    sums: the gradient of each microbatch's loss. used: the gradients that the optimizer got.
    calls: of forward (f) and backward (b). left: the largest gradient afterwards.
    """

    sums: Tensor
    used: list[Tensor]
    calls: str
    log: Log
    left: float
    scale: float


def _gradient(model: nn.Module) -> Tensor:
    empty = [torch.zeros_like(w) if w.grad is None else w.grad for w in model.parameters()]
    return nn.utils.parameters_to_vector(empty).clone()


def _step(token_step: Any, counted: Sequence[int], limit: float, factor: float = 1.0) -> Step:
    """Take one step with the reader's function (collective)."""
    model, used, calls, sums = new_gpt(), list[Tensor](), list[str](), []
    for part in (parts := _microbatches(batch(0, rows=1), counted)):
        SUMMED(model, part).backward()
        sums.append(_gradient(model))
        model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: used.append(_gradient(model)))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def watched(model: nn.Module, part: Batch) -> Tensor:
        total = SUMMED(model, part) * factor
        calls.append("f")
        total.register_hook(lambda _: calls.append("b"))
        return total

    try:
        with recorded() as log:
            token_step(model, optimizer, scaler, parts, watched, limit)
    except (TypeError, AttributeError) as error:
        if any(counted):
            raise
        raise RuntimeError(f"{NO_BACKWARD} ({error})") from error
    left = _gradient(model).abs().max().item()
    return Step(torch.stack(sums), used, "".join(calls), log, left, scaler.get_scale())


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


def _equals_ddp(token_step: Callable[..., Any]) -> bool:
    open_impatient_group()
    seen = compare(lambda: _train(token_step, new_gpt()), torchs_way)
    return all(map(torch.equal, seen.own, seen.torchs))


def _observe(token_step: Callable[..., Any]) -> str | None:
    """Take single steps on three ranks. If all are right, train on two, where DDP's bits hold."""
    ranks = run_ranks(_take_steps, token_step, nproc=3, timeout=PATIENCE)
    if hint := _judge(*map(list, zip(*ranks, strict=True))):
        return hint
    if all(run_ranks(_equals_ddp, token_step, nproc=2, timeout=PATIENCE)):
        return None
    return "right up to rounding, but not DDP's bits. Multiply the losses, not the gradients"


def _close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() < 1e-4 * wanted.norm())


def _judge(
    plain: list[Step], clipped: list[Step], infinite: list[Step], empty: list[Step]
) -> str | None:
    """Judge the steps of `_take_steps`, each a list by rank."""
    if not all(step.used for step in [*plain, *clipped]):
        return "the optimizer took no step. Call scaler.step; it skips gradients that are NaN"
    (used, *others), small = [step.used[0] for step in plain], clipped[0].used[0]
    if not all(torch.equal(used, other) for other in others):
        return "the ranks step with different gradients: average them after the last backward"
    sums, counts = torch.stack([step.sums for step in plain]), torch.tensor(COUNTED)
    total, last = sums.sum((0, 1)), sums[:, -1].sum(0)
    mean, own = total / counts.sum(), (sums.sum(1) / counts.sum(1, keepdim=True)).sum(0)
    each = (sums / counts.clamp(min=1)[..., None]).sum((0, 1))
    unequal = "'s mean has the same weight. Divide by the number of tokens on all ranks"
    undivided = ", but nothing has divided by the number of tokens"
    hints = [
        (own / 3, f"each rank{unequal}"),
        (own, "each rank divided by its own number of tokens. Add up those of all ranks"),
        (each / 3, f"each microbatch{unequal}"),
        (each / 9, f"each microbatch{unequal}"),
        (mean / 3, "a third of what it should be. The average divides by the 3 ranks as well"),
        (mean * 2 / 3, "made for two ranks, and here are 3: ask for the world size"),
        (total, f"the gradient of the sum{undivided}"),
        (total / 3, f"the average over the ranks of the sum of each{undivided}"),
        (total / counts.numel() / BLOCK_SIZE, "divided by all targets: do not count -100"),
        (mean * SCALE, "still multiplied by the scale: unscale them, and call scaler.step"),
        (mean / SCALE, "divided by the scale, but the loss was never multiplied by it"),
        (last / counts.sum(), "of the last microbatch alone: do not zero the others"),
    ]
    for wrong, hint in hints:
        if _close(used, wrong):
            return hint if hint.startswith("each ") else f"the gradients are {hint}"
    if not _close(used, mean):
        return "below the limit, the gradient is not that of the mean over all tokens of all ranks"
    if "ff" in plain[0].calls:
        return "two microbatches were in memory at once. Call backward before the next forward"
    sizes = [call.size for call in plain[0].log.calls]
    if len(sizes) > TENSORS + 1 or not 0 <= sum(sizes) - gradient_bytes(WEIGHTS) <= 64:
        return (
            f"your step made {len(sizes)} collective calls, of {sum(sizes):,} bytes. All it needs "
            "is one for the count, and the average of the gradients after the last microbatch"
        )
    if plain[0].left:
        return "the gradients are still there, so the next step would add to them"
    if (length := small.norm().item()) > 1.001 * LIMIT:
        return f"with the limit {LIMIT}, the gradient has the norm {length:.2f}: clip its norm"
    if _close(small * SCALE, mean * LIMIT / mean.norm()):
        return "you clipped the gradient while it was still multiplied by the scale"
    if not _close(small, mean * LIMIT / mean.norm()):
        return (
            "the clipped gradient points in another direction than the mean. A single rank's or "
            "microbatch's was clipped: clip once, when the mean is complete"
        )
    if any(step.used for step in infinite):
        return (
            "an infinite gradient of rank 1 reached the weights. The ranks must have averaged "
            "before scaler.unscale_ looks for it, and scaler.step must take the step, or skip it"
        )
    if infinite[0].scale == SCALE:
        return "after an infinite gradient, the scale is as before: end with scaler.update()"
    wanted = torch.stack([step.sums for step in empty]).sum((0, 1)) / 24
    if not empty[0].used or not _close(empty[0].used[0], wanted):
        return "it is right, but not with 2 microbatches, or not if a rank has no tokens"
    return None


EXERCISES = {"token_step": Exercise(_observe, lambda seen: seen[0], nproc=0)}
