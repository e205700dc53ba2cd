"""Typical mistakes in the exercises of chapter 08, and words of the hint that each must get."""

import time

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
    return trains_as_if_even(model, optimizer, batches[:number])


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


def barrier_on_rank_0_alone(prepare):
    if dist.get_rank() == 0:
        prepare()
        dist.barrier()
    else:
        prepare()


def sleeps_instead(prepare):
    time.sleep(dist.get_rank())
    prepare()


def nobody(prepare):
    dist.barrier()


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


def prepares_twice(prepare):
    if dist.get_rank() == 0:
        prepare()
    dist.barrier()
    prepare()


MISTAKES = {
    "train_epoch": [
        (trains_as_if_even, "does not join its all-reduce"),
        (stops_with_the_shortest, "trained on [3, 3]"),
        (trains_apart, "different weights"),
        (halves_the_last, "add up to 15.0, but your steps add up to 10.5"),
        (returns_nothing, "returned [None, None]"),
    ],
    "first_on_rank_0": [
        (barrier_on_rank_0_alone, "that the other rank never calls"),
        (sleeps_instead, "before rank 0 had finished"),
        (nobody, "rank 0 never called prepare()"),
        (rank_0_alone, "rank 1 never called prepare()"),
        (the_wrong_way_round, "rank 0 came after it"),
        (prepares_twice, "2x on rank 0"),
    ],
}
