"""Typical wrong answers to the exercise of chapter 06, and words of the hint that each gets."""

from contextlib import nullcontext


def without_dividing(model, loss_of, microbatches):
    for number, microbatch in enumerate(microbatches, start=1):
        with model.no_sync() if number < len(microbatches) else nullcontext():
            loss_of(microbatch).backward()


def without_no_sync(model, loss_of, microbatches):
    for microbatch in microbatches:
        (loss_of(microbatch) / len(microbatches)).backward()


def all_in_no_sync(model, loss_of, microbatches):
    with model.no_sync():
        without_no_sync(model, loss_of, microbatches)


def zeroed_each_time(model, loss_of, microbatches):
    for number, microbatch in enumerate(microbatches, start=1):
        model.zero_grad()
        with model.no_sync() if number < len(microbatches) else nullcontext():
            (loss_of(microbatch) / len(microbatches)).backward()


def without_backward(model, loss_of, microbatches):
    return sum(loss_of(microbatch) for microbatch in microbatches) / len(microbatches)


MISTAKES = {
    "accumulated_gradient": [
        (without_dividing, "3 times too large"),
        (without_no_sync, "DDP synchronized 3 times"),
        (all_in_no_sync, "never synchronized"),
        (zeroed_each_time, "contains only the last microbatch"),
        (without_backward, "Call backward() for each microbatch"),
    ],
}
