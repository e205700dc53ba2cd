"""Stage 2 of myddp.py: an equal start, the mean of the gradients, and a shard for each rank."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, myddp
from lesson.cost_model import Link, bucketed_all_reduce_seconds, bytes_sent, gradient_bytes
from lesson.partners import PATIENCE, open_impatient_group
from lesson.trial import (
    WEIGHTS,
    Batch,
    Prediction,
    Seen,
    Way,
    batch,
    compare,
    loss_of,
    new_gpt,
    vector,
    with_ddp,
)
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

State = dict[str, torch.Tensor]
NOT_SAVED = "1.table"  # a buffer that state_dict() leaves out
TENSORS = 15  # of the small GPT's weights
SIZES = [(12, 3), (10, 4), (1, 4)]  # items and ranks


def way(own: Any) -> Way:
    """Train in the reader's way: ranks that start apart, and a mean after each backward."""
    model = new_gpt(seed=dist.get_rank())
    own.start_alike(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(mine: Batch) -> None:
        loss_of(model, mine).backward()
        own.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    return Way(step, lambda: vector(model))


def torchs_way() -> Way:
    return with_ddp(seed=dist.get_rank())


def _start(start_alike: Callable[[nn.Module], Any]) -> tuple[State, State]:
    """Return the state of a model before and after the reader's function; each rank has its own."""
    open_impatient_group()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for _ in range(dist.get_rank() + 1):
        model(torch.rand(8, 3))  # moves the running mean and counts the batch
    model[1].register_buffer("table", torch.rand(2), persistent=False)
    before = _state(model)
    # In a group of its own, the barrier cannot be mistaken for a collective of the reader's. A rank
    # that calls too few collectives waits here, so the others run into the group's timeout.
    after_all = dist.new_group(timeout=PATIENCE)
    start_alike(model)
    dist.barrier(after_all)
    after = _state(model)
    dist.destroy_process_group()
    return before, after


def _state(model: nn.Module) -> State:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def _judge_start(seen: list[tuple[State, State]]) -> str | None:
    (wanted, first), *others = seen
    weights = ["0.weight", "0.bias", "1.weight", "1.bias"]
    buffers = [name for name in wanted if name not in [*weights, NOT_SAVED]]

    def differ(one: State, names: list[str]) -> bool:
        return not all(torch.equal(one[n], other[n]) for _, other in others for n in names)

    if differ(first, weights):
        return (
            "the parameters still differ between the ranks after your function. A broadcast works "
            "in place, so give it the parameters themselves, not copies of them."
        )
    if differ(wanted, weights):
        return (
            "all ranks now hold the same parameters, but not the ones that rank 0 had. Choose the "
            "collective that copies one rank's values, not one that combines all ranks' values."
        )
    if differ(first, buffers):
        return (
            "the parameters are right, but buffers such as BatchNorm's running mean still differ "
            "between the ranks. model.parameters() does not contain them."
        )
    if differ(wanted, buffers):
        return (
            "the parameters are right and all ranks hold the same buffers, but not the buffers of "
            "rank 0."
        )
    if differ(first, [NOT_SAVED]) or differ(wanted, [NOT_SAVED]):
        return (
            "a buffer that was registered with persistent=False did not become rank 0's. "
            "state_dict() leaves such buffers out, and model.buffers() does not."
        )
    return None


def predict(forward: float, backward: float, link: Link) -> Prediction:
    payload = gradient_bytes(WEIGHTS)
    seconds = bucketed_all_reduce_seconds(payload, TENSORS, 2, link.bandwidth, link.latency)
    return Prediction(forward + backward, seconds, bytes_sent(payload, 2))


class Averaged(NamedTuple):
    """A rank's gradient before and after the function, and the training in both ways."""

    before: Tensor
    after: Tensor
    seen: Seen


def _average(average_gradients: Callable[..., Any]) -> Averaged:
    open_impatient_group()
    model = new_gpt()
    loss_of(model, batch(0)).backward()
    before = _gradient(model)
    average_gradients(model)
    own = myddp.load(average_gradients=average_gradients)
    seen = compare(lambda: way(own), torchs_way)
    after = _gradient(model)
    dist.destroy_process_group()
    return Averaged(before, after, seen)


def _gradient(model: nn.Module) -> Tensor:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


def _judge_average(ranks: list[Averaged]) -> str | None:
    own, afters = torch.stack([rank.before for rank in ranks]), [rank.after for rank in ranks]
    hints = [
        (own[0], "rank 0's gradient is as before. all_reduce works in place: give it the gradient"),
        (own.sum(0), "the gradients are the sum over the ranks. DDP takes the mean"),
        (own.sum(0) / 4, "the gradients are half of the mean. Divide once, by the world size"),
    ]
    for gradient, hint in hints:
        if torch.allclose(afters[0], gradient, atol=1e-7):
            return hint
    if not torch.equal(*afters):
        return "the ranks end with different gradients. Every rank needs the mean"
    if not torch.allclose(afters[0], own.mean(0), atol=1e-7):
        return "the gradients are not the mean over the ranks: treat every parameter alike"
    own_weights, torchs = ranks[0].seen.own, ranks[0].seen.torchs
    if not all(map(torch.equal, own_weights, torchs)):
        return "the gradients are the mean, but the training differs from DDP's in the last bits"
    return None


def _shards(shard_indices: Callable[..., Any]) -> list[list[list[int]]]:
    """Return what each rank reads, for each of SIZES, in the epochs 0 and 1."""
    return [
        [list(shard_indices(length, rank, ranks, epoch)) for rank in range(ranks)]
        for length, ranks in SIZES
        for epoch in (0, 1)
    ]


def _judge_shards(seen: list[list[list[list[int]]]]) -> str | None:
    for number, found in enumerate(seen[0]):
        (length, ranks), epoch = SIZES[number // 2], number % 2
        wanted = []
        for rank in range(ranks):
            sampler: Any = DistributedSampler(range(length), ranks, rank)  # type: ignore
            sampler.set_epoch(epoch)
            wanted.append(list(sampler))
        if found != wanted:
            case = f"of {length} items on {ranks} ranks in epoch {epoch}"
            return f"{case}, you give {found}. {_mistake(found, wanted, seen[0], length)}"
    return None


def _mistake(found: Any, wanted: Any, all_found: Any, length: int) -> str:
    counts = [len(mine) for mine in found]
    flat = sorted({item for mine in found for item in mine})
    if len(set(counts)) > 1:
        return (
            "Every rank needs as many items, or a rank waits for the others: repeat the first ones"
        )
    if flat != list(range(length)):
        return "An item is missing, or none of yours. All ranks must draw the same permutation"
    if counts != [len(mine) for mine in wanted]:
        return (
            "Each rank has too many items: repeat only as many as are needed to divide them evenly"
        )
    if found[0] == sorted(found[0]):
        return "The order is that of the data set. Shuffle it"
    if all_found[0] == all_found[1]:
        return "It is the same in every epoch. Seed the generator with the epoch"
    if sorted(map(sorted, found)) != sorted(map(sorted, wanted)):
        return "Rank r takes the items r, r + world_size, r + 2 * world_size ... of the permutation"
    return "DistributedSampler gives other items: seed torch.Generator() with the epoch alone"


EXERCISES = {
    "start_alike": Exercise(_start, _judge_start, nproc=3),
    "average_gradients": Exercise(_average, _judge_average),
    "shard_indices": Exercise(_shards, _judge_shards, nproc=0),
}
