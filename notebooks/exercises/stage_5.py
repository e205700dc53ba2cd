"""Stage 5 of myddp.py: an optimizer that shards its state, as ZeRO-2 does."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, trial
from lesson.cost_model import PRECISIONS, Link, strategy_bytes_sent
from lesson.partners import open_impatient_group
from lesson.record import recorded
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

LR = 3e-3


def way(own: Any) -> trial.Way:
    """Train with the reader's optimizer, which averages the gradients, too."""
    optimizer = own.ShardedAdam(model := trial.new_gpt(), lr=LR)

    def step(mine: trial.Batch) -> None:
        trial.loss_of(model, mine).backward()
        optimizer.step()

    return trial.Way(step, lambda: trial.vector(model))


def torchs_way() -> trial.Way:
    """Train with ZeRO-1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # the import itself warns

    return trial.with_ddp(lambda weights: ZeroRedundancyOptimizer(weights, AdamW, lr=LR))


def predict(forward: float, backward: float, link: Link) -> trial.Prediction:
    sent = strategy_bytes_sent("ZeRO-2", trial.WEIGHTS, 2, PRECISIONS["fp32"])
    return trial.Prediction(forward + backward, link.latency + sent / link.bandwidth, sent)


class Observed(NamedTuple):
    """On a rank: what AdamW stepped with, and what is there after a step."""

    gradient: Tensor  # of this rank's own batch
    stepped: Tensor
    weights: Tensor
    held: float  # bytes per weight
    units: float


def _observe(ShardedAdam: Any) -> Observed:
    open_impatient_group()
    trial.loss_of(whole := trial.new_gpt(), trial.batch(0)).backward()
    gradient, before = trial.gradient_of(whole), trial.bytes_held()
    stepped: list[Tensor] = []

    def note(stepping: Optimizer, *_: Any) -> None:
        own = [each.grad for group in stepping.param_groups for each in group["params"]]
        stepped.extend(each.flatten().clone() for each in own if each is not None)

    optimizer = ShardedAdam(model := trial.new_gpt(), lr=LR)
    trial.loss_of(model, trial.batch(0)).backward()
    hook = register_optimizer_step_pre_hook(note)
    with recorded() as log:
        optimizer.step()
    hook.remove()
    dist.barrier()
    numbers = torch.cat([torch.zeros(0), *stepped])
    stepped.clear()
    held = (trial.bytes_held() - before - numbers.nbytes) / trial.WEIGHTS
    return Observed(
        gradient, numbers, trial.vector(model), held, trial.units_sent(log, trial.WEIGHTS)
    )


def _judge(ranks: list[Observed]) -> str | None:
    _, stepped, weights, held, units = ranks[0]
    chunks = [
        torch.stack(chunk)
        for chunk in zip(*[rank.gradient.tensor_split(len(ranks)) for rank in ranks], strict=True)
    ]
    if len(stepped) != chunks[0].shape[1]:
        return (
            f"on rank 0, AdamW steps {len(stepped)} of {trial.WEIGHTS} numbers, but it has to step "
            f"this rank's chunk alone: the first {chunks[0].shape[1]}"
        )
    if hint := trial.judge_mean([rank.stepped for rank in ranks], chunks):
        return f"when AdamW steps, {hint}. It steps with this rank's chunk of the mean"
    if torch.equal(weights, trial.vector(trial.new_gpt())):
        return "AdamW steps a copy: no weight of the model has changed"
    if not all(torch.equal(rank.weights, weights) for rank in ranks):
        return (
            "the ranks now hold different weights: each knows the new values of its own chunk "
            "alone, until you gather them"
        )
    if held > 7:
        return (
            f"after step(), a rank holds {held:.1f} bytes per weight, but 4 for the weights and "
            "8/3 for AdamW's state would do. Have you dropped the gradients, also your chunk's?"
        )
    return trial.judge_units([units], [2])


EXERCISES = {
    "ShardedAdam": Exercise(
        _observe, _judge, nproc=3, train=trial.training("ShardedAdam", way, torchs_way)
    )
}
