"""Typical wrong answers in stage 3 of myddp.py, and words of the hint that each gets."""

import torch
import torch.distributed as dist
from lesson import myddp
from torch.nn.utils import clip_grad_norm_

average_gradients = myddp.load().average_gradients


def own_count(microbatches):
    return sum((targets != -100).sum() for _, targets in microbatches)


def global_count(microbatches):
    count = own_count(microbatches)
    dist.all_reduce(count)
    return count


def backward(model, scaler, microbatches, loss_of, factor):
    for microbatch in microbatches:
        scaler.scale(loss_of(model, microbatch) * factor).backward()


def finish(model, optimizer, scaler, limit):
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def mean_of_means(model, optimizer, scaler, microbatches, loss_of, limit):
    backward(model, scaler, microbatches, loss_of, 1 / own_count(microbatches))
    average_gradients(model)
    finish(model, optimizer, scaler, limit)


def without_world_size(model, optimizer, scaler, microbatches, loss_of, limit):
    backward(model, scaler, microbatches, loss_of, 1 / global_count(microbatches))
    average_gradients(model)
    finish(model, optimizer, scaler, limit)


def factor_of(microbatches):
    return dist.get_world_size() / global_count(microbatches)


def averages_each(model, optimizer, scaler, microbatches, loss_of, limit):
    factor = factor_of(microbatches)
    for microbatch in microbatches:
        backward(model, scaler, [microbatch], loss_of, factor)
        average_gradients(model)
    finish(model, optimizer, scaler, limit)


def one_backward(model, optimizer, scaler, microbatches, loss_of, limit):
    total = sum(loss_of(model, microbatch) for microbatch in microbatches)
    scaler.scale(total * factor_of(microbatches)).backward()
    average_gradients(model)
    finish(model, optimizer, scaler, limit)


def clips_the_scaled_gradient(model, optimizer, scaler, microbatches, loss_of, limit):
    backward(model, scaler, microbatches, loss_of, factor_of(microbatches))
    average_gradients(model)
    clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def steps_at_once(model, optimizer, scaler, microbatches, loss_of, limit):
    backward(model, scaler, microbatches, loss_of, factor_of(microbatches))
    average_gradients(model)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    scaler.update()
    optimizer.zero_grad()


def keeps_the_gradients(model, optimizer, scaler, microbatches, loss_of, limit):
    optimizer.zero_grad = lambda: None
    backward(model, scaler, microbatches, loss_of, factor_of(microbatches))
    average_gradients(model)
    finish(model, optimizer, scaler, limit)


def skips_without_tokens(model, optimizer, scaler, microbatches, loss_of, limit):
    factor = factor_of(microbatches)
    for microbatch in microbatches:
        if own_count([microbatch]):
            backward(model, scaler, [microbatch], loss_of, factor)
    average_gradients(model)
    finish(model, optimizer, scaler, limit)


def leaves_zeros(model, optimizer, scaler, microbatches, loss_of, limit):
    backward(model, scaler, microbatches, loss_of, factor_of(microbatches))
    average_gradients(model)
    finish(model, optimizer, scaler, limit)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def halves_the_scale(model, optimizer, scaler, microbatches, loss_of, limit):
    backward(model, scaler, microbatches, loss_of, factor_of(microbatches))
    average_gradients(model)
    finish(model, optimizer, scaler, limit)
    scaler.update(scaler.get_scale() / 2)


MISTAKES = {
    "token_step": [
        (mean_of_means, "each rank's mean has the same weight"),
        (without_world_size, "a third of what they should be"),
        (averages_each, "your step made 46 collective calls"),
        (one_backward, "two microbatches were in memory at once"),
        (clips_the_scaled_gradient, "you clipped the gradient while it was still multiplied"),
        (steps_at_once, "reached the weights"),
        (keeps_the_gradients, "a later one does not"),
        (leaves_zeros, "it leaves gradients of zeros"),
        (halves_the_scale, "but the scale has changed"),
        (skips_without_tokens, "your function raised"),
    ],
}
