"""Typical mistakes of chapter 11, and words of the hint that each must get."""

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


MISTAKES = {
    "train_epoch": [
        (trains_as_if_even, "does not join its all-reduce"),
        (stops_with_the_shortest, "took [3, 3] of them"),
        (trains_apart, "different weights"),
        (halves_the_last, "add up to 15.0, but your steps add up to 10.5"),
        (returns_nothing, "returned [None, None]"),
    ],
}
