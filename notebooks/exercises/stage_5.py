"""Stage 5 of myddp.py: an optimizer that shards its state, as ZeRO-2 does."""

import gc
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, myddp, trial
from lesson.cost_model import PRECISIONS, Link, strategy_bytes_sent
from lesson.partners import open_impatient_group
from lesson.record import Log
from lesson.trial import WEIGHTS, Prediction, Seen, Way, loss_of, new_gpt, vector, with_ddp
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

# What a rank of two sends for each byte of a call. Gloo's reduce-scatter runs as an all-reduce.
SENT = {"recv": 0.0, "all_gather_into_tensor": 0.5, "reduce_scatter": 2.0}


def bytes_sent_in(log: Log) -> float:
    """Return the bytes that one of two ranks has sent."""
    return sum(SENT.get(call.name, 1.0) * call.size for call in log.calls)


def way(own: Any) -> Way:
    """Train with the reader's optimizer, which averages the gradients, too."""
    optimizer = own.ShardedAdam(model := new_gpt(), lr=1e-3)

    def step(mine: trial.Batch) -> None:
        loss_of(model, mine).backward()
        optimizer.step()

    return Way(step, lambda: vector(model))


def torchs_way() -> Way:
    """Train with ZeRO-1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # the import itself warns

    return with_ddp(lambda weights: ZeroRedundancyOptimizer(weights, AdamW))


def predict(forward: float, backward: float, link: Link) -> Prediction:
    sent = strategy_bytes_sent("ZeRO-2", WEIGHTS, 2, PRECISIONS["fp32"])
    return Prediction(forward + backward, link.latency + sent / link.bandwidth, sent)


class Observed(NamedTuple):
    """On a rank: what AdamW stepped with, what is left after a step, and three steps."""

    gradient: Tensor  # of this rank's own batch
    stepped: Tensor
    dropped: bool  # the gradients
    state: int  # bytes
    odd: tuple[Tensor, Tensor]  # nine weights after a step in the reader's way and in AdamW's
    seen: Seen


def _observe(ShardedAdam: Any) -> Observed:
    open_impatient_group()
    optimizer, stepped = ShardedAdam(model := new_gpt(), lr=1e-3), [torch.zeros(0)]
    loss_of(model, trial.batch(0)).backward()
    gradient = torch.cat([_gradient(weight) for weight in model.parameters()])

    def note(stepping: Optimizer, *_: Any) -> None:
        stepped.extend(
            _gradient(each) for group in stepping.param_groups for each in group["params"]
        )

    hook = register_optimizer_step_pre_hook(note)
    optimizer.step()
    hook.remove()
    dist.barrier()
    gc.collect()
    alive = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    states = [tensor for each in alive for own in each.state.values() for tensor in own.values()]
    state = sum(tensor.nbytes for tensor in states if tensor.ndim)  # without Adam's count of steps
    dropped = all(weight.grad is None for weight in model.parameters())
    odd = (
        _one_step(lambda model: ShardedAdam(model, lr=1e-3)),
        _one_step(lambda model: AdamW(model.parameters())),
    )
    own = myddp.load(ShardedAdam=ShardedAdam)
    seen = trial.compare(lambda: way(own), with_ddp)
    dist.destroy_process_group()
    return Observed(gradient, torch.cat(stepped), dropped, state, odd, seen)


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros(0) if weight.grad is None else weight.grad.detach().flatten().clone()


def _one_step(make_optimizer: Any) -> Tensor:
    """Train a model whose number of weights, 9, is not divisible by 2."""
    torch.manual_seed(0)
    optimizer = make_optimizer(model := nn.Linear(2, 3))
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    return vector(model)


def _judge(ranks: list[Observed]) -> str | None:
    _, stepped, dropped, state, odd, seen = ranks[0]
    own, other = (rank.gradient.tensor_split(2)[0] for rank in ranks)
    first = [rank.seen.own[0] for rank in ranks]
    same = [*map(torch.equal, seen.own, seen.torchs)]
    units = bytes_sent_in(seen.log) / (2 * WEIGHTS)
    if not len(stepped):
        return "no optimizer has taken a step: give your chunk to torch.optim.AdamW"
    if len(stepped) > len(own):
        return (
            f"on rank 0, AdamW steps {len(stepped)} numbers, and that is how many its state has. "
            "To shard it, give AdamW this rank's chunk of the weights alone"
        )
    if torch.equal(stepped, own + other):
        return "AdamW steps with the sum of the ranks' gradients. DDP takes the mean"
    if torch.equal(stepped, own):
        return "on rank 0, AdamW steps with rank 0's own gradient. Reduce-scatter it first"
    if not torch.equal(stepped, (own + other) / 2):
        return "on rank 0, AdamW does not step with the mean gradient of chunk 0"
    if torch.equal(first[0], vector(new_gpt())):
        return "AdamW steps a copy: no weight of the model has changed"
    if not torch.equal(*first):
        return (
            "the ranks now hold different weights: each knows the new values of its own chunk "
            "alone, until you gather them"
        )
    if not dropped:
        return "after step(), the weights still have a .grad, and the next backward() adds to it"
    if state < 8 * len(own) or (same[0] and not same[1]):
        return (
            "the first step is right, but Adam's averages do not live until the second. Make the "
            "optimizer once, in __init__"
        )
    if state > 8 * len(own):
        return f"AdamW's state takes {state} bytes on rank 0, but 8 per weight of its chunk do"
    if abs(units - 2) > 0.01:
        return (
            f"right, but a rank sends {units:g} units and not 2. An all-reduce takes 2 units, and "
            "so does Gloo's reduce-scatter; your ring's halves take one unit each"
        )
    if not torch.equal(*odd):
        return "it is right, but not for 9 weights on two ranks: a chunk may be one longer"
    return None if all(same) else "the weights differ from those of DDP with AdamW"


EXERCISES = {"ShardedAdam": Exercise(_observe, _judge)}
