"""Typical wrong answers to the exercises of chapter 05, and words of the hint that each gets."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_


def mean_of_means(outputs, targets):
    return F.cross_entropy(outputs, targets)


def summed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")


def global_count(targets):
    count = (targets != -100).sum()
    dist.all_reduce(count)
    return count


def without_world_size(outputs, targets):
    return summed(outputs, targets) / global_count(targets)


def counts_its_own(outputs, targets):
    own = (targets != -100).sum()
    return summed(outputs, targets) * dist.get_world_size() / own


def multiplies_only(outputs, targets):
    return summed(outputs, targets) * dist.get_world_size()


def counting_padding(outputs, targets):
    return summed(outputs, targets) * dist.get_world_size() / global_count(targets.abs())


def for_two_ranks(outputs, targets):
    return summed(outputs, targets) * 2 / global_count(targets)


def for_21_targets(outputs, targets):
    return summed(outputs, targets) * dist.get_world_size() / 21


def from_own_mean(outputs, targets):
    own = (targets != -100).sum()  # where it is 0, the mean is nan, and nan * 0 is nan
    weight = own * dist.get_world_size() / global_count(targets)
    return mean_of_means(outputs, targets) * weight


def own_mean_for_the_others(outputs, targets):
    """Leave out a rank that has no targets, and the mean is over the others' world size."""
    ranks = (targets != -100).any().long()
    dist.all_reduce(ranks)
    return summed(outputs, targets) * ranks / global_count(targets)


def detached(outputs, targets):
    return mean_of_means(outputs, targets).item()


def accumulate(model, scaler, parts, loss_of, *, divisor=None, after_part=None):
    for number, part in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else model.no_sync():
            scaler.scale(loss_of(model, part) / (divisor or len(parts))).backward()
        if after_part and number < len(parts):
            after_part()


def finish(model, optimizer, scaler, limit):
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()


def clips_the_scaled_gradient(model, optimizer, scaler, parts, loss_of, limit):
    accumulate(model, scaler, parts, loss_of)
    clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()


def clips_each_part(model, optimizer, scaler, parts, loss_of, limit):
    def clip():
        clip_grad_norm_(model.parameters(), limit * scaler.get_scale())

    accumulate(model, scaler, parts, loss_of, after_part=clip)
    finish(model, optimizer, scaler, limit)


def zeroes_each_time(model, optimizer, scaler, parts, loss_of, limit):
    accumulate(model, scaler, parts, loss_of, after_part=optimizer.zero_grad)
    finish(model, optimizer, scaler, limit)


def reduces_each_part(model, optimizer, scaler, parts, loss_of, limit):
    for part in parts:
        scaler.scale(loss_of(model, part) / len(parts)).backward()
    finish(model, optimizer, scaler, limit)


def reduces_no_part(model, optimizer, scaler, parts, loss_of, limit):
    with model.no_sync():
        reduces_each_part(model, optimizer, scaler, parts, loss_of, limit)


def sums_the_parts(model, optimizer, scaler, parts, loss_of, limit):
    accumulate(model, scaler, parts, loss_of, divisor=1)
    finish(model, optimizer, scaler, limit)


def divides_by_the_ranks(model, optimizer, scaler, parts, loss_of, limit):
    accumulate(model, scaler, parts, loss_of, divisor=len(parts) * dist.get_world_size())
    finish(model, optimizer, scaler, limit)


def takes_two_parts_for_granted(model, optimizer, scaler, parts, loss_of, limit):
    accumulate(model, scaler, parts, loss_of, divisor=2)
    finish(model, optimizer, scaler, limit)


def without_backward(model, optimizer, scaler, parts, loss_of, limit):
    scaler.scale(torch.stack([loss_of(model, part) for part in parts]).mean())
    finish(model, optimizer, scaler, limit)


def clips_nothing(model, optimizer, scaler, parts, loss_of, limit):
    accumulate(model, scaler, parts, loss_of)
    scaler.step(optimizer)
    scaler.update()


def never_scales(model, optimizer, scaler, parts, loss_of, limit):
    accumulate(model, torch.amp.GradScaler("cpu", enabled=False), parts, loss_of)
    clip_grad_norm_(model.parameters(), limit)
    optimizer.step()


def steps_without_the_scaler(model, optimizer, scaler, parts, loss_of, limit):
    accumulate(model, scaler, parts, loss_of)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    scaler.update()


def forgets_update(model, optimizer, scaler, parts, loss_of, limit):
    accumulate(model, scaler, parts, loss_of)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)


MISTAKES = {
    "global_mean_loss": [
        (mean_of_means, "each rank's mean has the same weight"),
        (counts_its_own, "divided by its own number of targets"),
        (without_world_size, "is a third of what it should be"),
        (summed, "you got a third of the gradient of the sum"),
        (multiplies_only, "the gradient of the sum over all targets, not of their mean"),
        (counting_padding, "targets of -100 were counted"),
        (for_two_ranks, "There are 3 ranks here"),
        (for_21_targets, "but not for 18"),
        (from_own_mean, "so its loss is NaN"),
        (own_mean_for_the_others, "DDP still divides by the number of all ranks"),
        (detached, "a loss that backward() can start from"),
    ],
    "clipped_step": [
        (clips_the_scaled_gradient, "measured it while it was still"),
        (clips_each_part, "another direction"),
        (zeroes_each_time, "only the last microbatch"),
        (reduces_each_part, "reduced the gradients 2 times"),
        (reduces_no_part, "inside no_sync: the last"),
        (sums_the_parts, "twice as long"),
        (divides_by_the_ranks, "half as long"),
        (takes_two_parts_for_granted, "but not for 3"),
        (without_backward, "Call backward() for each microbatch"),
        (clips_nothing, "Nothing clipped"),
        (never_scales, "is not scaled"),
        (steps_without_the_scaler, "scaler.step(optimizer), which skips it then"),
        (forgets_update, "called after step()"),
    ],
}
