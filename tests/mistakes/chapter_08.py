"""Typical mistakes of chapter 08, and words of the hint that each must get."""

import torch
import torch.distributed as dist


def trains_as_if_even(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    return len(batches)


def stops_with_the_shortest(model, optimizer, batches):
    number = torch.tensor(len(batches))
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    for _, batch in zip(range(number), batches, strict=False):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    return int(number)


def trains_apart(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model.module(batch).mean().backward()
        optimizer.step()
    return len(batches)


def halves_the_last(model, optimizer, batches):
    with model.join():
        return trains_as_if_even(model, optimizer, batches)


def returns_nothing(model, optimizer, batches):
    with model.join(divide_by_initial_world_size=False):
        trains_as_if_even(model, optimizer, batches)


def everyone_at_once(prepare):
    prepare()


def only_the_others_wait(prepare):
    if dist.get_rank() != 0:
        dist.barrier()
    prepare()


def rank_0_alone(prepare):
    if dist.get_rank() == 0:
        prepare()
    dist.barrier()


def the_wrong_way_round(prepare):
    if dist.get_rank() != 0:
        prepare()
    dist.barrier()
    if dist.get_rank() == 0:
        prepare()


MISTAKES = {
    "train_epoch": [
        (trains_as_if_even, "waits for a rank that has none left"),
        (stops_with_the_shortest, "took [3, 3] of them"),
        (trains_apart, "different weights"),
        (halves_the_last, "add up to 15.0, the steps taken to 10.5"),
        (returns_nothing, "return [None, None]"),
    ],
    "first_on_rank_0": [
        (everyone_at_once, "before rank 0 had ended it"),
        (only_the_others_wait, "waits in a collective that the other rank does not call"),
        (rank_0_alone, "rank 1 has not called prepare()"),
        (the_wrong_way_round, "rank 0 came after it"),
    ],
}
