"""Check on every rank what the collectives promise. test_collectives.py runs this script."""

import itertools
import math
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rank_checks import raised, run_checks

from ddp_ref.collectives import (
    barrier,
    broadcast_object,
    gather_tensors,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
)
from ddp_ref.model import gather_rows

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
INTEGERS = [torch.int64, torch.uint8]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]


class Record:
    """A class of this script. Its objects must arrive as objects of the receiver's own class."""

    def __init__(self, rank):
        self.rank = rank


def check_numbers_are_reduced_as_float64_and_integers_as_int64():
    me, world = dist.get_rank(), dist.get_world_size()
    own = {"loss": 0.1, "big": 2.0**53 - 10 if me == 0 else 1, "int": torch.tensor(2**60 + me)}
    sums = reduce_sum(own)
    assert sums["big"] == 2.0**53 - 10 + world - 1 and abs(sums["loss"] - 0.1 * world) < 1e-15
    assert sums["int"] == world * 2**60 + sum(range(world))
    for sign in (1, -1):
        values = {"rank": sign * me, "int": torch.tensor(sign * (2**62 + me))}
        smallest, largest = reduce_min(values), reduce_max(values)
        ends = sorted([0, sign * (world - 1)])
        assert [smallest["rank"], largest["rank"]] == ends and type(largest["rank"]) is float
        assert [smallest["int"] - sign * 2**62, largest["int"] - sign * 2**62] == ends


def check_a_tensor_of_any_shape_keeps_its_shape_and_dtype():
    """Results share memory neither with the arguments nor with each other."""
    me, world = dist.get_rank(), dist.get_world_size()
    expected = {reduce_max: world - 1, reduce_min: 0, reduce_sum: sum(range(world))}
    mean = {reduce_mean: sum(range(world)) / world}
    for dtype, shape in itertools.product([*FLOATS, *INTEGERS], [(), (0, 3), (2, 3, 4)]):
        for function, value in {**expected, **(mean if dtype in FLOATS else {})}.items():
            own = torch.full(shape, me).to(dtype)
            result = function({"x": own, "y": own})["x"]
            assert result.shape == shape and result.dtype == dtype
            assert torch.equal(result.double(), torch.full(shape, value).to(dtype).double())
            result.zero_()
            assert torch.equal(own.double(), torch.full(shape, float(me)).double())


def check_a_mean_is_weighted_by_the_samples():
    me, world = dist.get_rank(), dist.get_world_size()
    total = sum(10 * rank + 1 for rank in range(world))
    weighted = sum(rank * (10 * rank + 1) for rank in range(world)) / total
    means = reduce_mean({"loss": float(me), "rows": torch.tensor([me, 1.0])}, 10 * me + 1)
    assert means["loss"] == weighted
    assert torch.equal(means["rows"], torch.tensor([weighted, 1.0]))
    assert reduce_mean({"loss": float(me)})["loss"] == (world - 1) / 2
    # In float16, the small value would be lost, and this count is above the maximum.
    half = torch.tensor(2.0 if me else 2.0**-9, dtype=torch.float16)
    exact = torch.tensor((2.0 * (world - 1) + 2.0**-9) / world, dtype=torch.float64)
    assert reduce_mean({"x": half}, 100_000)["x"] == exact.half()


def check_a_bad_value_is_an_error_on_all_ranks():
    """Otherwise, the ranks without one would wait, or get a wrong number."""
    one, odd = {"loss": 1.0}, {"fine": 1.0, "odd": torch.ones(2, dtype=torch.int64)}
    for kind, reduction, values, text in [
        (ValueError, reduce_mean, (one, math.nan), "count must be at least 0 and finite, not nan"),
        (TypeError, reduce_sum, ({"loss": None},), "'loss' must be a number or a tensor, not None"),
        (ValueError, reduce_mean, (odd,), "cannot take the mean of 'odd', a torch.int64"),
        (ValueError, reduce_sum, ({"x": torch.ones(2).bool()},), "cannot take the sum of 'x'"),
    ]:
        own = (one,) if dist.get_rank() == 0 else values
        assert text in str(raised(kind, reduction, *own))


def check_a_rank_without_values_takes_part():
    """The others pass their values in any order."""
    me, world = dist.get_rank(), dist.get_world_size()
    for empty in range(world):
        others = [rank for rank in range(world) if rank != empty]
        own = {"number": me - 9.0, "half": torch.full((2, 2), me + 1, dtype=torch.float16)}
        own = dict(sorted(own.items(), reverse=bool(me % 2)))
        combined = [(reduce_sum, sum(others)), (reduce_max, max(others)), (reduce_min, min(others))]
        for function, expected in [*combined, (reduce_mean, sum(others) / len(others))]:
            results = function({} if me == empty else own)
            times = len(others) if function is reduce_sum else 1
            assert results["number"] == expected - 9 * times
            assert results["half"].dtype == torch.float16
            assert results["half"].tolist() == [[expected + times] * 2] * 2
        bad = {"a": math.nan, "t": torch.tensor([math.inf, math.nan])}
        good = {"a": 2.0, "t": torch.tensor([1.0, 2.0])}
        means = reduce_mean(bad if me == empty else good, int(me != empty))
        assert means["a"] == 2.0 and means["t"].tolist() == [1, 2]


def check_a_non_finite_value_is_seen_on_all_ranks():
    """gloo's own maximum of 0, nan and 2, on three ranks in this order, is 0."""
    me, world = dist.get_rank(), dist.get_world_size()
    seen_by = {math.nan: [reduce_sum, reduce_mean, reduce_max, reduce_min]}
    seen_by |= {math.inf: [reduce_sum, reduce_max], -math.inf: [reduce_mean, reduce_min]}
    for bad, (value, functions) in itertools.product(range(world), seen_by.items()):
        own = value if me == bad else float(me)
        for function in functions:
            results = function({"loss": own, "rows": torch.tensor([0.0, own])})
            assert str(results["loss"]) == str(value)
            assert str(results["rows"].tolist()) == str([0.0, value])


def check_different_calls_are_an_error_on_all_ranks():
    reduction = reduce_sum if dist.get_rank() == 0 else reduce_mean
    error = raised(ValueError, reduction, {"loss": 1.0})
    assert str(error).startswith("rank 0 in reduce_sum; rank 1 in reduce_mean; ")
    error = raised(ValueError, broadcast_object, 5, dist.get_rank())
    assert str(error).startswith("rank 0 in broadcast from rank 0; rank 1 in broadcast from rank 1")


def check_different_names_shapes_or_dtypes_are_an_error_on_all_ranks():
    pairs = [
        ({"loss": 1.0, "accuracy": 1.0}, {"loss": 1.0}, "'accuracy'"),
        ({"x": torch.ones(4, 4)}, {"x": torch.ones(16)}, "[4, 4]"),
        ({"x": torch.ones(2)}, {"x": torch.ones(2).double()}, "torch.float64"),
    ]
    for first, other, named in pairs:
        error = str(raised(ValueError, reduce_sum, other if dist.get_rank() else first))
        assert named in error and f"rank 0: {{'{next(iter(first))}'" in error
    assert reduce_sum({"a": 1.0}) == {"a": dist.get_world_size()}  # the group is still in order


def check_tensors_of_any_shape_and_dtype_arrive_in_order():
    """Views that are not contiguous do, too."""
    me, world = dist.get_rank(), dist.get_world_size()

    def part(rank, shape, index):
        """Return a tensor whose shape and dtype depend on the rank."""
        generator = torch.Generator().manual_seed(rank)
        whole = torch.randint(0, 2, (rank + 2, *shape), generator=generator)
        return whole.to(DTYPES[(index + rank) % len(DTYPES)]).transpose(0, -1)

    cases = itertools.product([(), (0, 3), (2, 3, 4)], range(len(DTYPES)), (False, True))
    for shape, index, to_all in cases:
        own = part(me, shape, index)
        parts = gather_tensors(own, to_all)
        if me != 0 and not to_all:
            assert parts is None
            continue
        assert len(parts) == world
        assert all(_same(got, part(rank, shape, index)) for rank, got in enumerate(parts))
        parts[me].fill_(1)
        assert _same(own, part(me, shape, index))  # the result does not share its memory
    assert gather_tensors(torch.tensor(me), to_all=True) == [*range(world)]


def _same(one, other):
    numbers = one.to(torch.complex64), other.to(torch.complex64)  # float8 cannot be compared
    return one.dtype == other.dtype and torch.equal(*numbers)


def check_a_rank_without_a_tensor_is_none_in_the_list():
    me, world = dist.get_rank(), dist.get_world_size()
    for empty in range(world):
        for to_all in (False, True):
            parts = gather_tensors(None if me == empty else torch.full((me + 1,), me), to_all)
            if me == 0 or to_all:
                assert [part is None for part in parts] == [rank == empty for rank in range(world)]
                assert all(p.tolist() == [r] * (r + 1) for r, p in enumerate(parts) if r != empty)


def check_a_part_that_is_no_tensor_is_an_error_on_all_ranks():
    own = [1] if dist.get_rank() == 1 else torch.ones(1)
    error = str(raised(TypeError, gather_tensors, own))
    assert error == "rank 1 passed a list, not a dense tensor: use gather_objects"


def check_rows_may_have_any_memory_layout():
    me, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(8.0 * world * 24).reshape(8 * world, 2, 3, 4)
    permuted = whole.contiguous(memory_format=torch.channels_last)
    gathered = gather_rows(permuted[me::world], 8 * world)
    assert me or torch.equal(gathered, whole)


def check_any_rank_can_broadcast_an_object():
    me, world = dist.get_rank(), dist.get_world_size()
    for src in range(world):
        mine = {"from": me, "values": [torch.full((2,), me), None], "record": Record(me)}
        got = broadcast_object(mine if me == src else "not looked at", src)
        assert got["from"] == src and got["values"][0].tolist() == [src, src]
        assert (got is mine) == (me == src) and type(got["record"]) is Record
    for src in (world, -1):
        error = raised(ValueError, broadcast_object, "x", src)
        assert str(error) == f"src must be a rank of this world, from 0 to {world - 1}, not {src}"
    assert broadcast_object(None) is None


def check_a_barrier_waits_for_all_ranks():
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.3)
        Path("the last has called").touch()
    barrier()
    assert Path("the last has called").exists()


def check_a_gather_costs_rank_0_little_beyond_its_result():
    """Each rank sends 32 MiB. Only rank 0 receives them, so no other rank needs memory for them."""
    me, world, nbytes = dist.get_rank(), dist.get_world_size(), 2**25
    part = torch.ones(nbytes // 4, 1)
    gather_rows(part[:10], 10 * world)  # the first call allocates for all calls
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = gather_rows(part, len(part) * world)
    extra = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    # Beside the whole, rank 0 holds the rows that it receives and those before them.
    assert extra < nbytes * (world + 2.5 if me == 0 else 0.5), extra
    assert (whole is None) == (me > 0)


if __name__ == "__main__":
    run_checks(globals())
