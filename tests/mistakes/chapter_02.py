"""Typical wrong answers to the exercises of chapter 02, and words of the hint each must get."""

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


def _right(rank, world_size, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def returns_numbers(rank, world_size, port):
    return _right(rank, world_size, port) | {"RANK": rank, "WORLD_SIZE": world_size}


def forgets_the_local_rank(rank, world_size, port):
    variables = _right(rank, world_size, port)
    del variables["LOCAL_RANK"]
    return variables


def counts_from_one(rank, world_size, port):
    return _right(rank + 1, world_size, port)


def puts_all_on_local_rank_0(rank, world_size, port):
    return _right(rank, world_size, port) | {"LOCAL_RANK": "0"}


def leaves_out_rank_0(rank, world_size, port):
    return _right(rank, world_size - 1, port)


def gives_each_rank_its_own_port(rank, world_size, port):
    return _right(rank, world_size, port + rank)


def takes_the_usual_port(rank, world_size, port):
    return _right(rank, world_size, 29500)


def gives_each_rank_its_own_address(rank, world_size, port):
    return _right(rank, world_size, port) | {"MASTER_ADDR": f"127.0.0.{rank + 1}"}


def names_another_machine(rank, world_size, port):
    return _right(rank, world_size, port) | {"MASTER_ADDR": "ddp.invalid"}


def returns_one_variable(rank, world_size, port):
    return f"RANK={rank}"


MISTAKES = {
    "start_alike": [
        (parameters_alone, "model.parameters() does not contain them"),
        (what_is_saved, "registered with persistent=False did not become rank 0's"),
        (a_copy, "the parameters still differ between the ranks"),
        (the_mean, "but not the ones that rank 0 had"),
        (rank_0_alone, "waiting in a collective that another rank never called"),
    ],
    "environment_for": [
        (returns_numbers, "environment variables are text"),
        (forgets_the_local_rank, "LOCAL_RANK is missing"),
        (counts_from_one, "Ranks count from 0"),
        (puts_all_on_local_rank_0, "numbers the processes of one machine"),
        (leaves_out_rank_0, "All of them count, rank 0 too"),
        (gives_each_rank_its_own_port, "must all meet at one port"),
        (takes_the_usual_port, "but the caller asked for port"),
        (gives_each_rank_its_own_address, "different values of MASTER_ADDR"),
        (names_another_machine, "did not meet at MASTER_ADDR 'ddp.invalid'"),
        (returns_one_variable, "should return a dict"),
    ],
}
