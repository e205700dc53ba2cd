"""The contract of on_rank and rank_first: on real ranks, at decoration, and in a fork."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_checks import check_passes, checks, on_ranks

from ddp_ref import cleanup_ddp, reduce_sum, run_ranks
from ddp_ref.decorators import on_rank

SCRIPT = "on_rank_checks.py"


@pytest.mark.parametrize("name", checks(SCRIPT))
@pytest.mark.parametrize("launch", [on_ranks(SCRIPT, 3, fresh=True)])
def test_on_ranks(name, launch):
    check_passes(launch, name)


def generator():
    yield 1


async def coroutine():
    return 1


@pytest.mark.parametrize("func", [generator, coroutine])
def test_a_function_whose_body_runs_after_the_call_is_refused(func):
    text = f"cannot wrap .*{func.__name__}: it is a generator or coroutine"
    with pytest.raises(TypeError, match=text):
        on_rank(0)(func)


def test_a_process_forked_from_a_rank_cannot_use_its_group_or_close_it():
    """It shares the rank's sockets, so a call would wait until the timeout."""

    def work():
        dist.init_process_group("gloo")  # ddp_ref has no record of it before the first call
        for call in (on_rank(0, broadcast=True)(lambda: 1), lambda: reduce_sum({"x": 1.0})):
            in_a_fork = {"num_workers": 1, "timeout": 30, "collate_fn": lambda _, call=call: call()}
            with pytest.raises(RuntimeError, match=r"a fork of rank .* call this in the rank"):
                next(iter(torch.utils.data.DataLoader(range(2), **in_a_fork)))
            call()
        if not (pid := os.fork()):
            cleanup_ddp()
            os._exit(0 if dist.is_initialized() else 1)
        return os.waitpid(pid, 0)[1], reduce_sum({"ranks": 1.0})["ranks"]

    assert run_ranks(work, timeout=timedelta(seconds=60)) == [(0, 2.0)] * 2
