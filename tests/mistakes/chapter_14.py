"""Typical wrong answers to the exercise of chapter 14, and words of the hint each must get."""

from contextlib import nullcontext

import torch
from torch.nn.utils import clip_grad_norm_


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
    "clipped_step": [
        (clips_the_scaled_gradient, "measured it while it was still"),
        (clips_each_part, "another direction"),
        (reduces_each_part, "reduced the gradients 2 times"),
        (reduces_no_part, "inside no_sync"),
        (sums_the_parts, "twice as long"),
        (clips_nothing, "Nothing clipped"),
        (never_scales, "is not scaled"),
        (takes_two_parts_for_granted, "but not for 3"),
        (forgets_update, "called after step()"),
    ],
}
