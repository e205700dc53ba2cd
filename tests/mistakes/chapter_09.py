"""Typical wrong answers to the exercises of chapter 09, and a part of the hint for each."""

import torch.distributed as dist

from ddp_ref import on_rank


def on_every_rank(work):
    return work()


def under_an_if(work):
    return work() if dist.get_rank() == 0 else None


def broadcast_by_hand(work):
    box = [work()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box)
    return box[0]


def without_broadcast(work):
    return on_rank(0)(work)()


MISTAKES = {
    "prepare_once": [
        (on_every_rank, "1 on rank 0, 1 on rank 1. It should run once"),
        (under_an_if, "rank 1 went on as if it had not"),
        (broadcast_by_hand, "rank 1 raises RuntimeError: the error itself"),
        (without_broadcast, "classes', but rank 1 got None"),
    ]
}
