"""Typical wrong answers in stage 1 of myddp.py, and words of the hint that each gets."""

import torch


def rotate(ring, chunks, first, steps, take):
    """Pass chunks on, beginning with that of rank + first; `take` gets the old and the new one."""
    n = ring.world_size
    for step in range(steps):
        ring.send(chunks[(ring.rank + first - step) % n])
        mine = chunks[(ring.rank + first - 1 - step) % n]
        take(mine, ring.receive(mine))


def add(mine, received):
    mine += received


def not_in_place(mine, received):
    mine = mine + received


def ends_with_another_chunk(ring, chunks):
    rotate(ring, chunks, 0, ring.world_size - 1, add)


def one_step_too_many(ring, chunks):
    rotate(ring, chunks, -1, ring.world_size, add)


def adds_nowhere(ring, chunks):
    rotate(ring, chunks, -1, ring.world_size - 1, not_in_place)


def receives_first(ring, chunks):
    ring.receive(chunks[ring.rank - 2])
    ring.send(chunks[ring.rank - 1])


def receives_another(ring, chunks):
    ring.send(chunks[ring.rank])
    ring.receive(chunks[ring.rank])


def never_stops(ring, chunks):
    while True:
        ring.send(chunks[ring.rank - 1])
        chunks[ring.rank - 2] += ring.receive(chunks[ring.rank - 2])


def begins_with_the_wrong_chunk(ring, chunks):
    rotate(ring, chunks, 1, ring.world_size - 1, torch.Tensor.copy_)


MISTAKES = {
    "reduce_scatter": [
        (ends_with_another_chunk, "every rank has to end with its own"),
        (one_step_too_many, "messages, but all is done in 3"),
        (adds_nowhere, "no chunk has changed"),
        (receives_first, "waited for a message that nobody had sent"),
        (never_stops, "does your loop stop?"),
        (receives_another, "receive the chunk that the rank before you sends"),
    ],
    "all_gather": [
        (ends_with_another_chunk, "These chunks are complete: copy them"),
        (begins_with_the_wrong_chunk, "has lost its own chunk"),
    ],
}
