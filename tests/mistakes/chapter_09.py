"""Typical wrong answers to the exercises of chapter 09, and a part of the hint for each."""

import torch.distributed as dist


def under_an_if(work):
    return work() if dist.get_rank() == 0 else None


def broadcast_by_hand(work):
    box = [work()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box)
    return box[0]


MISTAKES = {
    "prepare_once": [
        (under_an_if, "rank 1 went on as if it had not"),
        (broadcast_by_hand, "rank 1 raises RuntimeError: the error itself"),
    ]
}
