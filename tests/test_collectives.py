"""The collectives, on real ranks and in a world of one."""

import math

import pytest
import torch
from rank_checks import check_passes, checks, on_ranks

from ddp_ref.collectives import (
    barrier,
    broadcast_object,
    gather_objects,
    gather_tensors,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
)

SCRIPT = "collectives_checks.py"


@pytest.mark.parametrize("name", checks(SCRIPT))
@pytest.mark.parametrize("launch", [on_ranks(SCRIPT, 3)])
def test_on_ranks(name, launch):
    check_passes(launch, name)


def test_a_world_of_one(alone):
    for function in (reduce_sum, reduce_max, reduce_min, reduce_mean):
        own = torch.arange(16.0, requires_grad=True).reshape(4, 4).t()
        results = function({"a": 0.25, "nan": math.nan, "c": own})
        assert results["a"] == 0.25 and type(results["a"]) is float and math.isnan(results["nan"])
        assert torch.equal(results["c"], own) and not results["c"].requires_grad
        assert results["c"].data_ptr() != own.data_ptr()
        assert function({}) == {}
    assert reduce_mean({"a": 3.0}, 7) == {"a": 3.0}
    with pytest.raises(ValueError, match="there is no mean: the count is 0 on every rank"):
        reduce_mean({"a": 3.0}, 0)
    own = torch.ones(2, requires_grad=True)
    (part,) = gather_tensors(own)
    assert part.tolist() == [1, 1] and not part.requires_grad
    assert part.data_ptr() != own.data_ptr()
    assert gather_objects({"x": 1}) == [{"x": 1}]
    assert broadcast_object("x") == "x"
    barrier()
