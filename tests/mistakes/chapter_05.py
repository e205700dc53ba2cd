"""Typical wrong answers to the exercises of chapter 05, and words of the hint that each gets."""

from contextlib import nullcontext

import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_


def mean_of_means(outputs, targets):
    return F.cross_entropy(outputs, targets)


def global_count(targets):
    count = (targets != -100).sum()
    dist.all_reduce(count)
    return count


def without_world_size(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum") / global_count(targets)


def from_own_mean(outputs, targets):
    own = (targets != -100).sum()  # where it is 0, the mean is nan, and nan * 0 is nan
    return mean_of_means(outputs, targets) * own * dist.get_world_size() / global_count(targets)


def clips_the_scaled_gradient(model, optimizer, scaler, parts, loss_of, limit):
    for number, part in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else model.no_sync():
            scaler.scale(loss_of(model, part) / len(parts)).backward()
    clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()


def reduces_each_part(model, optimizer, scaler, parts, loss_of, limit):
    for part in parts:
        scaler.scale(loss_of(model, part) / len(parts)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()


def reduces_no_part(model, optimizer, scaler, parts, loss_of, limit):
    with model.no_sync():
        reduces_each_part(model, optimizer, scaler, parts, loss_of, limit)


MISTAKES = {
    "global_mean_loss": [
        (mean_of_means, "each rank's mean has the same weight"),
        (without_world_size, "is a third of what it should be"),
        (from_own_mean, "so its loss is NaN"),
    ],
    "clipped_step": [
        (clips_the_scaled_gradient, "measured it while it was still"),
        (reduces_each_part, "reduced the gradients 2 times"),
        (reduces_no_part, "inside no_sync: the last"),
    ],
}
