"""Stage 2 of myddp.py: an equal start, the mean of the gradients, and a shard for each rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lesson import Exercise, trial
from lesson.cost_model import Link, bucketed_all_reduce_seconds, bytes_sent, gradient_bytes
from lesson.partners import open_impatient_group
from lesson.record import recorded
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

State = dict[str, Tensor]
TENSORS = 15  # of the small GPT's weights
SIZES = [(12, 3), (10, 4), (1, 4)]  # items and ranks


def way(own: Any) -> trial.Way:
    """Train in the reader's way: ranks that start apart, and a mean after each backward."""
    own.start_alike(model := trial.new_gpt(seed=dist.get_rank()))
    return trial.with_steps(model, lambda: own.average_gradients(model))


def torchs_way() -> trial.Way:
    return trial.with_ddp(seed=dist.get_rank())


def predict(forward: float, backward: float, link: Link) -> trial.Prediction:
    payload = gradient_bytes(trial.WEIGHTS)
    seconds = bucketed_all_reduce_seconds(payload, TENSORS, 2, link.bandwidth, link.latency)
    return trial.Prediction(forward + backward, seconds, bytes_sent(payload, 2))


def _start(start_alike: Callable[[nn.Module], Any]) -> tuple[State, State]:
    """Return the state of a model before and after the reader's function; each rank has its own."""
    open_impatient_group()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    for _ in range(dist.get_rank() + 1):
        model(torch.rand(8, 3))  # moves the running mean and counts the batch
    model[1].register_buffer("table", torch.rand(2), persistent=False)
    # The same tensors are read again, so those that took their places do not count.
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    start_alike(model)
    dist.barrier()  # a rank waits here if another one calls more collectives
    return before, {name: tensor.detach() for name, tensor in tensors.items()}


def _judge_start(seen: list[tuple[State, State]]) -> str | None:
    wanted = seen[0][0]
    differ = [
        name
        for name in wanted
        if not all(torch.equal(after[name], wanted[name]) for _, after in seen)
    ]
    if differ == ["0.bias"]:
        return "a frozen parameter is not rank 0's: skip none for its requires_grad"
    if {"0.weight", "0.bias", "1.weight", "1.bias"} & {*differ}:
        return (
            "the parameters are not rank 0's on every rank. A broadcast works in place, so give it "
            "the parameters themselves, not copies of them"
        )
    if differ:
        return (
            f"the parameters are right, but not the buffers {', '.join(differ)}. model.parameters()"
            " contains no buffers, and state_dict() only those that were registered as persistent"
        )
    return None


def _average(average_gradients: Callable[..., Any]) -> tuple[Tensor, Tensor, float]:
    """Return a rank's gradient before and after the reader's function, and the units sent."""
    open_impatient_group()
    trial.loss_of(model := trial.new_gpt(), trial.batch(0)).backward()
    own = trial.gradient_of(model)
    with recorded() as log:
        average_gradients(model)
    dist.barrier()
    return own, trial.gradient_of(model), trial.units_sent(log, trial.WEIGHTS)


def _judge_average(ranks: list[tuple[Tensor, Tensor, float]]) -> str | None:
    own, found, units = zip(*ranks, strict=True)
    if hint := trial.judge_mean(found, [torch.stack(own)] * len(found)):
        return hint
    return trial.judge_units([max(2, *units)], [2])  # fewer: by a call that is not recorded


def _shards(shard_indices: Callable[..., Any]) -> tuple[list[list[list[int]]], bool]:
    """Return what each rank reads, for each of SIZES, in the epochs 0 and 1.

    And whether torch's own generator is as before.
    """
    before = torch.get_rng_state()
    found = [
        [list(shard_indices(length, rank, ranks, epoch)) for rank in range(ranks)]
        for length, ranks in SIZES
        for epoch in (0, 1)
    ]
    untouched = torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    return found, untouched


def _judge_shards(seen: list[tuple[list[list[list[int]]], bool]]) -> str | None:
    all_found, untouched = seen[0]
    for number, found in enumerate(all_found):
        (length, ranks), epoch = SIZES[number // 2], number % 2
        wanted = []
        for rank in range(ranks):
            sampler: Any = DistributedSampler(range(length), ranks, rank)  # type: ignore
            sampler.set_epoch(epoch)
            wanted.append(list(sampler))
        if found != wanted:
            case = f"of {length} items on {ranks} ranks in epoch {epoch}"
            return f"{case}, you give {found}. {_mistake(found, wanted, all_found, length)}"
    if not untouched:
        return (
            "the items are right, but torch.manual_seed seeds the whole process, so every rank's "
            "dropout begins again in each epoch. Seed a torch.Generator() of your own"
        )
    return None


def _mistake(found: Any, wanted: Any, all_found: Any, length: int) -> str:
    if [*map(len, found)] != [*map(len, wanted)]:
        return (
            f"Every rank needs {len(wanted[0])} items, or a rank waits for the others: repeat the "
            "first ones until the ranks can share them evenly"
        )
    if {item for mine in found for item in mine} != {*range(length)}:
        return "An item is missing, or none of yours. All ranks must draw the same permutation"
    if all_found[0] == all_found[1]:
        return "It is the same in every epoch. Seed the generator with the epoch, and shuffle"
    if sorted(map(sorted, found)) != sorted(map(sorted, wanted)):
        return "Rank r takes the items r, r + world_size, r + 2 * world_size ... of the permutation"
    return "DistributedSampler gives other items: seed torch.Generator() with the epoch alone"


EXERCISES = {
    "start_alike": Exercise(_start, _judge_start, nproc=3),
    "average_gradients": Exercise(
        _average,
        _judge_average,
        nproc=3,
        train=trial.training("average_gradients", way, torchs_way),
    ),
    "shard_indices": Exercise(_shards, _judge_shards, nproc=0),
}
