"""Typical wrong answers to the exercise of chapter 01, and words of the hint each must get."""


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
    "without_gradient": [
        (looks_at_the_loss, "stays at 1"),
        (looks_for_none, "is there, but all zeros"),
        (looks_for_zeros, "the forward pass leaves out"),
        (names_frozen_ones, "frozen on purpose"),
        (keeps_old_gradients, "left by an earlier step"),
    ],
}
