"""Typical wrong answers to the exercise of chapter 01, and words of the hint each must get."""


def looks_for_none(model, loss_fn, inputs, targets):
    loss_fn(model(inputs), targets).backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


def names_frozen_ones(model, loss_fn, inputs, targets):
    model.zero_grad()
    loss_fn(model(inputs), targets).backward()
    named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return [name for name, grad in named if grad is None or not grad.any()]


MISTAKES = {
    "without_gradient": [
        (looks_for_none, "is there, but all zeros"),
        (names_frozen_ones, "frozen on purpose"),
    ],
}
