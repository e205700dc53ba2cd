"""Typical wrong answers to the exercise of chapter 02, and words of the hint each must get."""

import torch.distributed as dist


def parameters_alone(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def what_is_saved(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def a_copy(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor.clone(), src=0)


def the_mean(model):
    for tensor in model.state_dict().values():
        dist.all_reduce(tensor)
        tensor.copy_(tensor / dist.get_world_size())


def rank_0_alone(model):
    if dist.get_rank() == 0:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


MISTAKES = {
    "start_alike": [
        (parameters_alone, "model.parameters() does not contain them"),
        (what_is_saved, "registered with persistent=False did not become rank 0's"),
        (a_copy, "the parameters still differ between the ranks"),
        (the_mean, "but not the ones that rank 0 had"),
        (rank_0_alone, "waiting in a collective that another rank never called"),
    ]
}
