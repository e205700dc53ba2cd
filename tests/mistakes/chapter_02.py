"""Typical wrong answers to the exercises of chapter 02, and words of the hint each must get."""

import torch.distributed as dist


def parameters_alone(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def rank_0_alone(model):
    if dist.get_rank() == 0:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


def returns_numbers(rank, world_size, port):
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}


def names_another_machine(rank, world_size, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "ddp.invalid",
        "MASTER_PORT": str(port),
    }


MISTAKES = {
    "start_alike": [
        (parameters_alone, "model.parameters() does not contain them"),
        (rank_0_alone, "waiting in a collective that another rank never called"),
    ],
    "environment_for": [
        (returns_numbers, "environment variables are text"),
        (names_another_machine, "did not meet at MASTER_ADDR 'ddp.invalid'"),
    ],
}
