"""Typical wrong answers to the exercise of chapter 10, and words of the hint each must get."""

import torch
import torch.distributed as dist


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def own_verdict(model):
    mine = flat(model)
    other = mine.clone()
    dist.broadcast(other, src=0)
    return torch.equal(mine, other)


def compare_sums(model):
    total = flat(model).double().sum()
    most, least = total.clone(), total.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(most == least)


def first_parameter_only(model):
    most = next(model.parameters()).detach().clone()
    least = most.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return torch.equal(most, least)


def nearly_equal(model):
    most, least = flat(model), flat(model)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return torch.allclose(most, least)


def equal_by_force(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return own_verdict(model)


def compare_with_the_sum(model):
    total = flat(model)
    dist.all_reduce(total)
    return torch.equal(flat(model), total)


MISTAKES = {
    "replicas_equal": [
        (own_verdict, "the ranks disagree"),
        (compare_sums, "two weights had changed places"),
        (first_parameter_only, "the last parameter differed"),
        (nearly_equal, "differed in the seventh digit"),
        (equal_by_force, "your function changed the model"),
        (compare_with_the_sum, "returned False for equal replicas"),
    ],
}
