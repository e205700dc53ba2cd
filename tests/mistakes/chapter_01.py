"""Typical wrong answers to the exercises of chapter 01, and words of the hint each must get."""

import torch.distributed as dist


def keeps_its_own(own_gradient, count):
    return own_gradient


def takes_the_plain_mean(own_gradient, count):
    dist.all_reduce(own_gradient)
    return own_gradient / dist.get_world_size()


def sums_over_the_samples(own_gradient, count):
    total = own_gradient * count
    dist.all_reduce(total)
    return total


def divides_by_its_own_count(own_gradient, count):
    total = own_gradient * count
    dist.all_reduce(total)
    return total / count


def takes_64_for_granted(own_gradient, count):
    total = own_gradient * count
    dist.all_reduce(total)
    return total / 64


def looks_at_the_loss(model, loss_fn, inputs, targets):
    names = [name for name, _ in model.named_parameters()]
    return names if loss_fn(model(inputs), targets) == 0 else []


def looks_for_none(model, loss_fn, inputs, targets):
    loss_fn(model(inputs), targets).backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


def looks_for_zeros(model, loss_fn, inputs, targets):
    loss_fn(model(inputs), targets).backward()
    named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return [name for name, grad in named if grad is not None and not grad.any()]


def names_frozen_ones(model, loss_fn, inputs, targets):
    model.zero_grad()
    loss_fn(model(inputs), targets).backward()
    named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return [name for name, grad in named if grad is None or not grad.any()]


def keeps_old_gradients(model, loss_fn, inputs, targets):
    loss_fn(model(inputs), targets).backward()
    named = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, grad in named if grad is None or not grad.any()]


MISTAKES = {
    "batch_gradient": [
        (keeps_its_own, "nothing was exchanged"),
        (takes_the_plain_mean, "returned the plain mean"),
        (sums_over_the_samples, "the sum over all samples, not the mean"),
        (divides_by_its_own_count, "divided the sum by its own number of samples"),
        (takes_64_for_granted, "but not for 20 and 12"),
    ],
    "without_gradient": [
        (looks_at_the_loss, "stays at 1"),
        (looks_for_none, "is there, but all zeros"),
        (looks_for_zeros, "the forward pass leaves out"),
        (names_frozen_ones, "frozen on purpose"),
        (keeps_old_gradients, "left by an earlier step"),
    ],
}
