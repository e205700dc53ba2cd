"""What readers write for chapter 02, and words of the hint that they get."""

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


MISTAKES = {
    "start_alike": [
        (parameters_alone, "the buffers, such as BatchNorm's running mean, still differ"),
        (what_is_saved, "persistent=False is not that of rank 0"),
        (a_copy, "the parameters still differ"),
        (the_mean, "not the ones that rank 0 had"),
    ]
}
