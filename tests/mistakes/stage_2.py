"""Typical wrong answers in stage 2 of myddp.py, and words of the hint that each gets."""

import math

import torch
import torch.distributed as dist


def parameters_alone(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def saved_alone(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def skips_frozen(model):
    trained = [each for each in model.parameters() if each.requires_grad]
    for tensor in [*trained, *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def sums(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def divides_by_two(model):
    sums(model)
    for parameter in model.parameters():
        parameter.grad /= 2


def averages_copies(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad / 2)


def calls_on_rank_0_alone(model):
    if dist.get_rank() == 0:
        sums(model)


def order(length, epoch):
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()


def without_padding(length, rank, world_size, epoch):
    return order(length, epoch)[rank::world_size]


def the_same_in_every_epoch(length, rank, world_size, epoch):
    even = math.ceil(length / world_size) * world_size
    return (order(length, 0) * world_size)[:even][rank::world_size]


def blocks(length, rank, world_size, epoch):
    count = math.ceil(length / world_size)
    return (order(length, epoch) * world_size)[rank * count :][:count]


def seeds_the_process(length, rank, world_size, epoch):
    even = math.ceil(length / world_size) * world_size
    items = torch.randperm(length, generator=torch.manual_seed(epoch)).tolist()
    return (items * world_size)[:even][rank::world_size]


def averages_twice(model):
    for parameter in 2 * [*model.parameters()]:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


MISTAKES = {
    "start_alike": [
        (parameters_alone, "not the buffers 1.running_mean, 1.running_var"),
        (saved_alone, "not the buffers 1.table"),
        (skips_frozen, "a frozen parameter is not rank 0's"),
    ],
    "average_gradients": [
        (sums, "rank 0's gradient is the sum over the ranks"),
        (divides_by_two, "half of the sum, but here are 3 ranks"),
        (averages_copies, "rank 0's gradient is this rank's own"),
        (averages_twice, "sends 4.0 units"),
        (calls_on_rank_0_alone, "for another rank that never made that call"),
    ],
    "shard_indices": [
        (without_padding, "items, or a rank waits for the others"),
        (the_same_in_every_epoch, "It is the same in every epoch"),
        (blocks, "Rank r takes the items r"),
        (seeds_the_process, "seeds the whole process"),
    ],
}
