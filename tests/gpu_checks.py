"""Checks that run on every rank; test_gpu.py starts the ranks.

Each rank has its own GPU. With `--share-gpus`, the ranks share what there is.
"""

import os
import sys
import warnings
from itertools import product

import torch
from handler_checks import assert_same_on_all_ranks, rank, world_size
from rank_checks import raised, run_checks
from torch import nn
from training_job import Points, flat, job

from ddp_ref import (
    Handler,
    barrier,
    broadcast_object,
    gather_objects,
    gather_tensors,
    initialize_ddp,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
)


def gpu_of(rank):
    return torch.device("cuda", rank % torch.cuda.device_count())


def check_reductions():
    ones = torch.ones(2, 3, device="cuda")
    numbers = {"number": rank(), "tensor": ones * rank()}
    total = sum(range(world_size()))
    summed = reduce_sum(numbers)
    assert summed["number"] == total and torch.equal(summed["tensor"], ones * total)
    assert (
        reduce_max({"x": rank()}) == {"x": world_size() - 1} and reduce_min({"x": 1.5})["x"] == 1.5
    )
    assert reduce_mean({"x": float(rank())}, count=1)["x"] == total / world_size()


def check_received_tensors_are_on_this_ranks_gpu():
    mine = torch.full((rank() + 1, 2), float(rank()), device=initialize_ddp().device)
    parts = gather_tensors(mine, to_all=True)
    assert [part.shape[0] for part in parts] == [*range(1, world_size() + 1)]
    assert all(
        part.device.type == "cpu" and part.unique().item() == r for r, part in enumerate(parts)
    )
    first = gather_tensors(mine)
    assert (first is None) == (rank() > 0)
    dicts = gather_objects({"rank": rank(), "weights": mine}, to_all=True)
    assert [part["rank"] for part in dicts] == [*range(world_size())]
    last = broadcast_object([mine], world_size() - 1)
    barrier()
    received = {tensor.device for tensor in [*last, *(part["weights"] for part in dicts)]}
    assert received == {initialize_ddp().device}


def check_handler_is_the_same_on_all_ranks_in_all_precisions():
    clipped = {"clip_norm": 1.0, "accumulate": 2}
    counted = {"on_nonfinite": "skip", "count": lambda batch: len(batch[1])}
    for precision, options in product(("fp32", "bf16", "fp16"), (clipped, counted)):
        handler = job(8 * world_size(), 2, device="cuda", precision=precision, **options)
        handler.set_val_loader(Points(5), 2)
        handler.train(2)
        assert_same_on_all_ranks(flat(handler.model))
        assert_same_on_all_ranks(torch.tensor([*handler.history.values()], device="cuda"))
        assert handler.train_losses[-1] < handler.train_losses[0]
        outputs = handler.predict(Points(5), 2)
        assert (outputs is None) == (rank() > 0)
        if rank() == 0 and precision == "fp32":
            own = handler.module.eval()(Points(5).inputs.cuda()).cpu()
            torch.testing.assert_close(outputs, own)


def check_a_wrong_device_is_an_error_on_all_ranks():
    """A hard-coded "cuda:0" is right on rank 0 only, which must raise too and not wait."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if torch.cuda.device_count() > 1:
        error = raised(ValueError, lambda: Handler(model, optimizer, nn.MSELoss(), device="cuda:0"))
        assert "device=cuda:0, but rank 1 of the open group uses cuda:1" in str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handler = Handler(model, optimizer, nn.MSELoss(), device=str(gpu_of(rank())))
    assert handler.device == initialize_ddp().device


if __name__ == "__main__":
    if "--share-gpus" in sys.argv:
        os.environ["DDP_SHARE_GPUS"] = "1"
    run_checks(globals())
