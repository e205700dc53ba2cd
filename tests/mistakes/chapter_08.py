"""Typical mistakes in the exercises of chapter 08, and words of the hint that each must get."""

import torch.distributed as dist


def trains_as_if_even(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    return len(batches)


def halves_the_last(model, optimizer, batches):
    with model.join():
        return trains_as_if_even(model, optimizer, batches)


def barrier_on_rank_0_alone(prepare):
    prepare()
    if dist.get_rank() == 0:
        dist.barrier()


def prepares_twice(prepare):
    if dist.get_rank() == 0:
        prepare()
    dist.barrier()
    prepare()


MISTAKES = {
    "train_epoch": [
        (trains_as_if_even, "does not join its all-reduce"),
        (halves_the_last, "add up to 15.0, but your steps add up to 10.5"),
    ],
    "first_on_rank_0": [
        (barrier_on_rank_0_alone, "that the other rank never calls"),
        (prepares_twice, "2x on rank 0"),
    ],
}
