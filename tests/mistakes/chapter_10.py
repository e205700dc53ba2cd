"""Typical wrong answers to the exercises of chapter 10, and words of the hint each must get."""

from contextlib import nullcontext

import torch
from torch.nn.utils import clip_grad_norm_


def forgets_the_buckets(strategy, ranks):
    return {"ZeRO": 8 + 8 / ranks, "FSDP2": 16 / ranks}.get(strategy, 16)


def divides_it_all(strategy, ranks):
    return (20 if strategy == "DDP" else 16) / ranks


def divides_ddp_beyond_two(strategy, ranks):
    return 32 / ranks if strategy == "DDP, bucket view" else 20


def forgets_one_of_adams_numbers(strategy, ranks):
    return {"DDP": 16, "FSDP2": 12 / ranks}.get(strategy, 12)


def divides_the_gradients_of_zero(strategy, ranks):
    whole = {"DDP": 20, "DDP, bucket view": 16, "FSDP2": 16 / ranks}
    return whole.get(strategy, 4 + 12 / ranks)


def keeps_the_weights_of_fsdp_whole(strategy, ranks):
    whole = {"DDP": 20, "DDP, bucket view": 16, "ZeRO": 8 + 8 / ranks}
    return whole.get(strategy, 4 + 12 / ranks)


def accumulate(net, scaler, parts, loss_of, *, share=True, after_part=None):
    for number, part in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else net.no_sync():
            loss = loss_of(net, part) / (len(parts) if share else 1)
            scaler.scale(loss).backward()
        if after_part:
            after_part()


def finish(net, optimizer, scaler, limit):
    scaler.unscale_(optimizer)
    clip_grad_norm_(net.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()


def clips_the_scaled_gradient(net, optimizer, scaler, parts, loss_of, limit):
    accumulate(net, scaler, parts, loss_of)
    clip_grad_norm_(net.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()


def clips_each_part(net, optimizer, scaler, parts, loss_of, limit):
    def clip():
        clip_grad_norm_(net.parameters(), limit * scaler.get_scale())

    accumulate(net, scaler, parts, loss_of, after_part=clip)
    finish(net, optimizer, scaler, limit)


def reduces_each_part(net, optimizer, scaler, parts, loss_of, limit):
    for part in parts:
        scaler.scale(loss_of(net, part) / len(parts)).backward()
    finish(net, optimizer, scaler, limit)


def reduces_no_part(net, optimizer, scaler, parts, loss_of, limit):
    for part in parts:
        with net.no_sync():
            scaler.scale(loss_of(net, part) / len(parts)).backward()
    finish(net, optimizer, scaler, limit)


def sums_the_parts(net, optimizer, scaler, parts, loss_of, limit):
    accumulate(net, scaler, parts, loss_of, share=False)
    finish(net, optimizer, scaler, limit)


def clips_nothing(net, optimizer, scaler, parts, loss_of, limit):
    accumulate(net, scaler, parts, loss_of)
    scaler.step(optimizer)
    scaler.update()


def forgets_update(net, optimizer, scaler, parts, loss_of, limit):
    accumulate(net, scaler, parts, loss_of)
    scaler.unscale_(optimizer)
    clip_grad_norm_(net.parameters(), limit)
    scaler.step(optimizer)


def never_scales(net, optimizer, scaler, parts, loss_of, limit):
    accumulate(net, torch.amp.GradScaler("cpu", enabled=False), parts, loss_of)
    clip_grad_norm_(net.parameters(), limit)
    optimizer.step()


def takes_two_parts_for_granted(net, optimizer, scaler, parts, loss_of, limit):
    accumulate(net, scaler, parts, lambda net, part: loss_of(net, part) / 2, share=False)
    finish(net, optimizer, scaler, limit)


MISTAKES = {
    "bytes_a_weight": [
        (forgets_the_buckets, "something that plain DDP holds"),
        (divides_it_all, "another number of bytes"),
        (divides_ddp_beyond_two, "it changes with the ranks"),
        (divides_the_gradients_of_zero, "ZeRO divides less"),
        (keeps_the_weights_of_fsdp_whole, "FSDP2 divides less"),
    ],
    "clipped_step": [
        (clips_the_scaled_gradient, "the scaled one was measured"),
        (clips_each_part, "another direction"),
        (reduces_each_part, "reduced 2 times"),
        (reduces_no_part, "never reduced"),
        (sums_the_parts, "a sum over the parts"),
        (clips_nothing, "nothing was clipped"),
        (never_scales, "is not scaled"),
        (takes_two_parts_for_granted, "but not for 3"),
        (forgets_update, "called after step()"),
    ],
}
