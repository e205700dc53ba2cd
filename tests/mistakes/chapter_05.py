"""Typical wrong answers to the exercises of chapter 05, and words of the hint that each gets."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


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


def mean_of_means(outputs, targets):
    return F.cross_entropy(outputs, targets)


def without_world_size(outputs, targets):
    count = (targets != -100).sum()
    dist.all_reduce(count)
    return F.cross_entropy(outputs, targets, reduction="sum") / count


def summed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")


def counting_padding(outputs, targets):
    count = torch.tensor(len(targets))
    dist.all_reduce(count)
    total = F.cross_entropy(outputs, targets, reduction="sum")
    return total * dist.get_world_size() / count


def for_two_ranks(outputs, targets):
    count = (targets != -100).sum()
    dist.all_reduce(count)
    return F.cross_entropy(outputs, targets, reduction="sum") * 2 / count


def from_own_mean(outputs, targets):
    own = (targets != -100).sum()
    count = own.clone()
    dist.all_reduce(count)
    return F.cross_entropy(outputs, targets) * own * dist.get_world_size() / count  # nan * 0 is nan


def own_mean_for_the_others(outputs, targets):
    """Leave out a rank that has no targets, and the mean is over the others' world size."""
    own = (targets != -100).sum()
    ranks, count = (own > 0).long(), own.clone()
    dist.all_reduce(ranks)
    dist.all_reduce(count)
    return F.cross_entropy(outputs, targets, reduction="sum") * ranks / count


def detached(outputs, targets):
    return mean_of_means(outputs, targets).item()


MISTAKES = {
    "batch_gradient": [
        (keeps_its_own, "nothing was exchanged"),
        (takes_the_plain_mean, "returned the plain mean"),
        (sums_over_the_samples, "the sum over all samples, not the mean"),
        (divides_by_its_own_count, "divided the sum by its own number of samples"),
        (takes_64_for_granted, "but not for 20 and 12"),
    ],
    "global_mean_loss": [
        (mean_of_means, "each rank's mean has the same weight"),
        (without_world_size, "is a third of what it should be"),
        (summed, "you got a third of the gradient of the sum"),
        (counting_padding, "targets of -100 were counted"),
        (for_two_ranks, "There are 3 ranks here"),
        (from_own_mean, "so its loss is NaN"),
        (own_mean_for_the_others, "DDP still divides by the number of all ranks"),
        (detached, "a loss that backward() can start from"),
    ],
}
