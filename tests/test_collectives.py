"""The collectives, on real ranks and in a world of one."""

import math

import pytest
import torch
import torch.distributed as dist
from rank_checks import check_passes, checks, on_ranks

from ddp_ref.collectives import (
    broadcast_object,
    gather_objects,
    gather_tensors,
    reduce_mean,
    reduce_sum,
)

SCRIPT = "collectives_checks.py"


@pytest.mark.parametrize("name", checks(SCRIPT))
@pytest.mark.parametrize("launch", [on_ranks(SCRIPT, world, fresh=True) for world in (2, 3)])
def test_on_ranks(name, launch):
    check_passes(launch, name)


@pytest.mark.parametrize("group", ["no group", "a group of one"])
def test_a_world_of_one(group, tmp_path):
    if group == "a group of one":
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert reduce_sum({"a": 1, "b": torch.tensor(2.5)}) == {"a": 1.0, "b": 2.5}
        assert reduce_mean({"a": 3.0}, 7) == {"a": 3.0}
        assert math.isnan(reduce_mean({"a": 3.0}, 0)["a"])
        assert reduce_sum({}) == {} and reduce_sum({}, names=["a"]) == {"a": 0.0}
        with pytest.raises(ValueError, match=r"\['b'\]"):
            reduce_sum({"a": 1.0}, names=["b"])
        (part,) = gather_tensors(torch.ones(2, requires_grad=True))
        assert part.tolist() == [1, 1] and not part.requires_grad
        assert gather_tensors(None) == [None]
        assert gather_objects("x") == ["x"] and broadcast_object("x") == "x"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
