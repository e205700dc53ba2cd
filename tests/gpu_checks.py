"""Checks that run on every rank; test_gpu.py starts the ranks.

Each rank has its own GPU. With `--share-gpus`, the ranks share what there is.
"""

import os
import runpy
import sys
import threading
import warnings
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from handler_checks import assert_same_on_all_ranks, rank, world_size
from harness import SCRIPTS
from rank_checks import raised, run_checks
from torch import nn
from training_job import Points, flat, job

from ddp_ref import (
    Callback,
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


def in_a_thread(work):
    """Call `work` in a new thread, where the current device is cuda:0 on every rank."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]  # raises IndexError if `work` has raised


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


def send_tensors_and_objects():
    """Gather and broadcast; return the devices on which GPU tensors have arrived."""
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
    return {tensor.device for tensor in [*last, *(part["weights"] for part in dicts)]}


def check_received_tensors_are_on_this_ranks_gpu_also_in_a_new_thread():
    for received in (send_tensors_and_objects(), in_a_thread(send_tensors_and_objects)):
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


class ForbidWaits(Callback):
    """Turn operations that wait for the GPU into errors, for 12 steps between two exchanges."""

    def on_step_end(self):
        forbidden = 27 <= self.handler.step < 39  # after the steps in which DDP times itself
        torch.cuda.set_sync_debug_mode("error" if forbidden else "default")


def check_steps_between_two_exchanges_do_not_wait_for_the_gpu():
    options = {"sync_every": 25} | {
        "precision": "bf16",
        "clip_norm": 1.0,
        "fused": True,
        "callbacks": [ForbidWaits()],
    }
    job(8 * 40 * world_size(), 8, device="cuda", **options).train(1)


def check_a_handler_uses_this_ranks_gpu_in_any_thread():
    current = []

    def loss_fn(outputs, targets):
        current.append(torch.cuda.current_device())
        return nn.functional.cross_entropy(outputs, targets)

    def make():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        handler = Handler(model, optimizer, loss_fn, device="cuda")
        handler.set_train_loader(Points(4 * world_size()), 2)
        handler.set_val_loader(Points(4 * world_size()), 2)
        return handler

    for handler in (make(), in_a_thread(make)):
        in_a_thread(handler.validate)
        in_a_thread(partial(handler.train, 1))
        assert in_a_thread(partial(handler.predict, Points(5), 2)) is None or rank() == 0
    assert len(current) > 4 and set(current) == {initialize_ddp().device.index}


def check_ranks_agree_if_one_gpu_has_no_bfloat16():
    """Handler raises on all ranks, and char_gpt.py chooses another precision on all."""
    model, last = nn.Linear(4, 2), world_size() - 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    make = partial(Handler, model, optimizer, nn.MSELoss(), precision="bf16")
    pick_precision = runpy.run_path(str(SCRIPTS / "char_gpt.py"))["pick_precision"]

    def is_supported(including_emulation=True):
        return including_emulation or rank() < last

    with patch.object(torch.cuda, "is_bf16_supported", is_supported):
        assert f"{gpu_of(last)} has no bfloat16" in str(raised(ValueError, make))
        assert pick_precision(initialize_ddp().device) == "fp16"


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
