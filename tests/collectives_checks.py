"""Check on every rank what the collectives promise. test_collectives.py runs this script."""

import math
import pickle
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rank_checks import raised, run_checks

from ddp_ref.collectives import (
    PickleFile,
    barrier,
    broadcast_object,
    gather_objects,
    gather_tensors,
    pack_object,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
)
from ddp_ref.training.evaluation import gather_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.int64]
DTYPES += [torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]
REDUCTIONS = [reduce_sum, reduce_mean, reduce_max, reduce_min]


class Record:
    """A class of this script. Its objects must arrive as objects of the receiver's own class."""

    def __init__(self, rank):
        self.rank = rank


def counted(name, call):
    """Return the call's result and how often it used `torch.distributed.<name>`."""
    uses, original = [], getattr(dist, name)
    setattr(dist, name, lambda *args, **kwargs: [uses.append(1), original(*args, **kwargs)][1])
    try:
        return call(), len(uses)
    finally:
        setattr(dist, name, original)


def check_sums_are_exact():
    me, world = dist.get_rank(), dist.get_world_size()
    sums = reduce_sum({"loss": 0.1, "big": 2.0**53 - 10 if me == 0 else 1})
    assert list(sums) == ["loss", "big"]
    assert sums["big"] == 2.0**53 - 10 + world - 1
    assert abs(sums["loss"] - 0.1 * world) < 1e-15
    assert all(type(value) is float for value in sums.values())


def check_largest_and_smallest_are_exact():
    me, world = dist.get_rank(), dist.get_world_size()
    for sign in (1, -1):
        values = {"rank": sign * me, "big": torch.tensor(sign * (2**62 + me))}
        largest, smallest = reduce_max(values), reduce_min(values)
        ends = sorted([0, sign * (world - 1)])
        assert [smallest["rank"], largest["rank"]] == ends and type(largest["rank"]) is float
        assert [smallest["big"] - sign * 2**62, largest["big"] - sign * 2**62] == ends
    assert reduce_min({"x": -math.inf if me == 0 else 1.0})["x"] == -math.inf
    assert reduce_max({"x": -math.inf})["x"] == -math.inf


def check_a_tensor_of_any_shape_keeps_its_shape_and_dtype():
    me, world = dist.get_rank(), dist.get_world_size()
    ranks = [*range(world)]
    for dtype in DTYPES:
        for shape in [(), (1,), (0, 3), (4, 4), (2, 3, 4)]:
            cases = [(reduce_sum, sum(ranks)), (reduce_max, world - 1), (reduce_min, 0)]
            cases += [(reduce_mean, sum(ranks) / world)]
            if dtype == torch.bool:
                cases = cases[1:3]
            elif dtype.is_complex:
                cases = [cases[0], cases[3]]
            elif not dtype.is_floating_point:
                cases = cases[:3]
            for function, expected in cases:
                own = torch.full(shape, me).to(dtype)
                (result,) = function({"x": own}).values()
                assert result.shape == shape and result.dtype == dtype
                assert torch.equal(result.to(torch.complex64), _as_complex(shape, expected, dtype))
                assert torch.equal(own, torch.full(shape, me).to(dtype))


def _as_complex(shape, value, dtype):
    return torch.full(shape, value).to(dtype).to(torch.complex64)


def check_a_tensor_may_be_a_view_with_a_gradient():
    me, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_() * (me + 1)
    view = whole.t()[1:, ::2]
    assert view.requires_grad and not view.is_contiguous()
    for function in REDUCTIONS:
        result = function({"x": view})["x"]
        factor = {reduce_sum: sum(range(world + 1)), reduce_mean: (world + 1) / 2}
        expected = torch.arange(12.0).reshape(3, 4).t()[1:, ::2]
        expected = expected * factor.get(function, world if function is reduce_max else 1)
        assert torch.equal(result, expected) and not result.requires_grad
    z = torch.full((2,), 1 + 2j, dtype=torch.complex64).conj()
    assert torch.equal(reduce_sum({"z": z})["z"], world * z.resolve_conj())


def check_a_result_has_its_own_memory():
    """Results share memory neither with the arguments nor with each other."""
    own = {"x": torch.ones(3, dtype=torch.float64), "y": torch.ones(3, dtype=torch.float64)}
    for function in REDUCTIONS:
        results = function(own)
        results["x"].fill_(7)
        assert own["x"].tolist() == [1, 1, 1] and (results["y"] != 7).all()
        assert results["y"].untyped_storage().nbytes() == results["y"].nbytes


def check_mixed_dtypes_are_reduced_in_the_same_order_on_all_ranks():
    """Each rank has its own hash seed, so a set of dtypes would have a different order on each."""
    me, world = dist.get_rank(), dist.get_world_size()
    makers = {
        "number": lambda rank: rank + 0.5,
        "matrix": lambda rank: torch.full((4, 4), rank, dtype=torch.int64),
        "half": lambda rank: torch.full((3,), rank, dtype=torch.float16),
        "complex": lambda rank: torch.full((2,), rank, dtype=torch.complex64),
        "double": lambda rank: torch.tensor(rank, dtype=torch.float64),
        "bytes": lambda rank: torch.full((5,), rank, dtype=torch.uint8),
        "single": lambda rank: torch.full((2, 1), rank, dtype=torch.float32),
    }
    names = [*makers]
    for _ in range(20):
        rotated = names[me:] + names[:me] if world > 1 else names
        sums = reduce_sum({name: makers[name](me) for name in rotated})
        assert list(sums) == names
        assert sums["number"] == sum(range(world)) + world / 2
        for name in names[1:]:
            own = makers[name](me)
            assert sums[name].dtype == own.dtype and sums[name].shape == own.shape
            assert (sums[name] == sum(range(world))).all()


def check_all_numbers_and_floating_point_tensors_share_one_all_reduce():
    values = {"a": 1.0, "b": 2, "c": torch.ones(4, 4), "d": torch.ones(2).double()}
    for function in REDUCTIONS:
        assert counted("all_reduce", lambda f=function: f(values))[1] == 1
    integers = {"e": torch.ones(3, dtype=torch.int32), "f": torch.ones(2, dtype=torch.int64)}
    assert counted("all_reduce", lambda: reduce_sum({**values, **integers}))[1] == 2
    assert counted("all_reduce", lambda: reduce_sum({}))[1] == 0


def check_half_precision_is_summed_in_double():
    me, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float16, torch.bfloat16):
        own = torch.tensor(2.0 if me else 2.0**-9, dtype=dtype)
        exact = (2.0 * (world - 1) + 2.0**-9) / world
        result = reduce_mean({"x": own}, 100_000)["x"]  # a count above float16's maximum
        assert result == torch.tensor(exact, dtype=torch.float64).to(dtype)


def check_a_mean_is_weighted_by_the_samples():
    me, world = dist.get_rank(), dist.get_world_size()
    count = 10 * me + 1
    total = sum(10 * rank + 1 for rank in range(world))
    weighted = sum(rank * (10 * rank + 1) for rank in range(world)) / total
    for given in (count, float(count), torch.tensor(count)):
        means = reduce_mean({"loss": float(me), "one": 1, "rows": torch.tensor([me, 1.0])}, given)
        assert means["loss"] == weighted and means["one"] == 1
        assert torch.equal(means["rows"], torch.tensor([weighted, 1.0]))
    assert reduce_mean({"loss": float(me)})["loss"] == (world - 1) / 2


def check_an_invalid_count_is_an_error_on_all_ranks():
    for count in (-1, math.nan, math.inf):
        own = 5 if dist.get_rank() else count
        error = str(raised(ValueError, lambda own=own: reduce_mean({"loss": 1.0}, own)))
        assert error == f"count must be at least 0 and finite, not {count:g}"


def check_a_rank_without_values_takes_part():
    me, world = dist.get_rank(), dist.get_world_size()
    for empty in range(world):
        others = [rank for rank in range(world) if rank != empty]
        own = {
            "a": 1.0,
            "b": float(me),
            "c": torch.full((2, 2), me, dtype=torch.float16),
            "d": torch.tensor(-me - 5),
        }
        values = {} if me == empty else own
        sums, largest, smallest = reduce_sum(values), reduce_max(values), reduce_min(values)
        for results, combine in [(sums, sum), (largest, max), (smallest, min)]:
            assert list(results) == ["a", "b", "c", "d"]
            assert results["b"] == combine(others)
            assert results["c"].dtype == torch.float16
            assert results["c"].tolist() == [[combine(others)] * 2] * 2
            assert results["d"] == combine([-rank - 5 for rank in others])
        assert sums["a"] == world - 1
        del own["d"]
        for means in (reduce_mean(values and own), reduce_mean(values and own, len(values))):
            assert means["a"] == 1 and means["b"] == sum(others) / len(others)
            assert means["c"].tolist() == [[sum(others) / len(others)] * 2] * 2
        bad = {"a": math.nan, "t": torch.tensor([math.inf, math.nan])}
        good = {"a": 2.0, "t": torch.tensor([1.0, 2.0])}
        means = reduce_mean(bad if me == empty else good, int(me != empty))
        assert means["a"] == 2.0 and means["t"].tolist() == [1, 2]


def check_no_values_or_samples_on_any_rank():
    assert all(function({}) == {} for function in REDUCTIONS) and reduce_mean({}, 0) == {}
    means = reduce_mean({"loss": 1.0, "rows": torch.ones(2)}, 0)
    assert math.isnan(means["loss"]) and means["rows"].isnan().all()


def check_a_non_finite_value_is_seen_on_all_ranks():
    """gloo's own maximum of 0, nan and 2, on three ranks in this order, is 0."""
    me, world = dist.get_rank(), dist.get_world_size()
    for bad in range(world):
        for value in (math.nan, math.inf):
            loss = value if me == bad else float(me)
            rows = torch.full((7,), float(me))
            rows[3] = loss
            for function in REDUCTIONS:
                results = function({"loss": loss, "rows": rows})
                if math.isnan(value):
                    assert math.isnan(results["loss"])
                elif function is not reduce_min:
                    assert results["loss"] == math.inf
                assert torch.equal(results["rows"][3].isnan(), torch.tensor(math.isnan(value)))
                assert results["rows"][[0, 1, 2, 4, 5, 6]].isfinite().all()
            if math.isnan(value):
                results = reduce_max({"rows": rows}), reduce_min({"rows": rows})
                assert [each["rows"][0].item() for each in results] == [world - 1, 0]


def check_max_and_min_of_bools_are_any_and_all():
    me = dist.get_rank()
    for own, anywhere, everywhere in [(me == 0, True, False), (True, True, True)]:
        values = {"tensor": torch.tensor([own, False]), "number": own}
        largest, smallest = reduce_max(values), reduce_min(values)
        assert largest["tensor"].tolist() == [anywhere, False]
        assert smallest["tensor"].tolist() == [everywhere, False]
        assert (largest["number"], smallest["number"]) == (anywhere, everywhere)


def check_a_reduction_that_a_dtype_does_not_support_is_refused_on_all_ranks():
    cases = [
        (reduce_sum, torch.bool, "int"),
        (reduce_mean, torch.bool, "double"),
        (reduce_mean, torch.int64, "double"),
        (reduce_max, torch.complex64, "abs"),
        (reduce_min, torch.complex128, "abs"),
        (reduce_max, torch.uint64, "double"),
        (reduce_min, torch.uint64, "double"),
    ]
    for function, dtype, conversion in cases:
        own = {"fine": 1.0, "odd": torch.ones(2, dtype=dtype)}
        for values in (own, {} if dist.get_rank() == 0 else own):
            error = str(raised(ValueError, lambda f=function, v=values: f(v)))
            assert all(part in error for part in ("'odd'", str(dtype), f".{conversion}()"))
    assert reduce_sum({"a": 1.0}) == {"a": dist.get_world_size()}


def check_a_value_that_is_not_a_number_is_refused_by_name():
    for value in ("1.5", None, [1.0], 1j, np.ones(3), 10**400):
        for function in REDUCTIONS:
            error = raised(TypeError, lambda f=function, v=value: f({"loss": v}))
            assert str(error) == f"'loss' must be a number or a tensor, not {value!r}"


def check_different_names_shapes_or_dtypes_are_an_error_on_all_ranks():
    me = dist.get_rank()
    pairs = [
        ({"loss": 1.0, "accuracy": 1.0}, {"loss": 1.0}, "'accuracy'"),
        ({"x": torch.ones(4, 4)}, {"x": torch.ones(16)}, "[4, 4]"),
        ({"x": torch.ones(2)}, {"x": torch.ones(2).double()}, "torch.float64"),
        ({"x": torch.tensor(1.0, dtype=torch.float64)}, {"x": 1.0}, "number"),
    ]
    for first, other, named in pairs:
        for function in REDUCTIONS:
            error = str(raised(ValueError, lambda f=function, v=other if me else first: f(v)))
            assert named in error and "\n" not in error
            assert f"rank 0: {{'{next(iter(first))}'" in error and "; rank 1: {" in error
    assert reduce_sum({"a": 1.0}) == {"a": dist.get_world_size()}


def check_the_order_of_the_names_may_differ():
    names = ["a", "b", "c"]
    rotated = names[dist.get_rank() :] + names[: dist.get_rank()]
    sums = reduce_sum({name: names.index(name) for name in rotated})
    assert sums == {name: names.index(name) * dist.get_world_size() for name in names}
    assert list(sums) == names


def check_tensors_of_any_shape_and_dtype_arrive_in_order():
    me, world = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for shape in [(), (0,), (0, 3), (5,), (2, 3, 4)]:
            for ragged in (False, True):

                def part(rank, shape=shape, dtype=dtype, ragged=ragged):
                    size = (rank + 2, *shape) if ragged else shape
                    generator = torch.Generator().manual_seed(rank)
                    return torch.randint(0, 2, size, generator=generator).to(dtype)

                for to_all in (False, True):
                    own = part(me)
                    parts = gather_tensors(own, to_all)
                    if me != 0 and not to_all:
                        assert parts is None
                        continue
                    for rank, got in enumerate(parts):
                        assert got.dtype == dtype and got.shape == part(rank).shape
                        assert torch.equal(got.to(torch.complex64), part(rank).to(torch.complex64))
                    parts[me].fill_(1)
                    assert torch.equal(own.to(torch.complex64), part(me).to(torch.complex64))
    mixed = gather_tensors(torch.zeros(me + 1, dtype=DTYPES[me]))
    if me == 0:
        assert [(len(p), p.dtype) for p in mixed] == [(r + 1, DTYPES[r]) for r in range(world)]


def check_a_part_may_be_a_conjugate_or_negative_view():
    part = torch.full((3,), 1 + 2j, dtype=torch.complex64)
    for view in (part.conj(), part.conj().imag):
        for to_all in (False, True):
            parts = gather_tensors(view, to_all)
            if to_all or dist.get_rank() == 0:
                assert all(torch.equal(each, view.resolve_neg()) for each in parts)


def check_a_part_may_be_a_one_element_view_of_a_larger_tensor():
    for to_all in (False, True):
        parts = gather_tensors(torch.arange(8.0)[dist.get_rank() :: 8], to_all)
        assert (parts is None) == (dist.get_rank() > 0 and not to_all)
        assert parts is None or torch.equal(
            torch.cat(parts), torch.arange(float(dist.get_world_size()))
        )


def check_a_count_without_values_is_refused_on_all_ranks():
    for values in ({}, {} if dist.get_rank() == 0 else {"loss": 1.0}):
        error = raised(ValueError, lambda v=values: reduce_mean(v, 5))
        assert "values is {} but count is 5" in str(error)


def check_a_part_may_be_a_view_with_a_gradient():
    me = dist.get_rank()
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_() * (me + 1)
    parts = gather_tensors(whole.t()[1:, ::2])
    if me == 0:
        for rank, got in enumerate(parts):
            expected = torch.arange(12.0).reshape(3, 4).t()[1:, ::2] * (rank + 1)
            assert torch.equal(got, expected) and not got.requires_grad


def check_a_rank_without_a_tensor_is_none_in_the_list():
    me, world = dist.get_rank(), dist.get_world_size()
    for empty in range(world):
        for to_all in (False, True):
            parts = gather_tensors(None if me == empty else torch.full((me + 1,), me), to_all)
            if me == 0 or to_all:
                assert [part is None for part in parts] == [rank == empty for rank in range(world)]
                assert all(p.tolist() == [r] * (r + 1) for r, p in enumerate(parts) if r != empty)
    assert gather_tensors(None) == ([None] * world if me == 0 else None)
    assert gather_tensors(None, to_all=True) == [None] * world


def check_a_sparse_tensor_is_an_error_on_all_ranks():
    last, sparse = dist.get_world_size() - 1, torch.eye(2).to_sparse()
    own = sparse if dist.get_rank() == last else None
    error = str(raised(ValueError, gather_tensors, own))
    assert error.startswith(f"rank {last} passed a torch.sparse_coo tensor: pass its .to_dense()")
    parts = gather_objects(sparse, to_all=True)  # as the error advises
    assert all(torch.equal(part.to_dense(), torch.eye(2)) for part in parts)


def check_interleaved_rows_are_gathered_in_order():
    me, world = dist.get_rank(), dist.get_world_size()
    for shape in [(), (3,), (2, 0), (2, 200_000)]:  # the last one has large rows
        for rows in (0, 1, world, 3 * world + 1):
            whole = torch.arange(rows * math.prod(shape), dtype=torch.float32)
            whole = whole.reshape(rows, *shape)
            own = whole[me::world]
            gathered = gather_rows(own if len(own) else torch.empty(0), rows)
            if me:
                assert gathered is None
            else:
                expected = whole if rows else torch.empty(0)
                assert gathered.shape == expected.shape and torch.equal(gathered, expected)


def check_rows_may_have_any_memory_layout():
    me, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(8.0 * world * 24).reshape(8 * world, 2, 3, 4)
    permuted = whole.contiguous(memory_format=torch.channels_last)
    for given in (permuted, whole.transpose(1, 3).contiguous().transpose(1, 3)):
        gathered = gather_rows(given[me::world], 8 * world)
        assert me or torch.equal(gathered, whole)


def check_interleaved_list_entries_are_gathered_in_order():
    me, world = dist.get_rank(), dist.get_world_size()
    for rows in (0, 1, world, 3 * world + 1):
        whole = [f"entry {row}" for row in range(rows)]
        assert gather_rows(whole[me::world], rows) == (None if me else whole)


def check_objects_arrive_in_order():
    me, world = dist.get_rank(), dist.get_world_size()
    for to_all in (False, True):
        own = {"rank": me, "long": "x" * 1000 * me, "tensor": torch.ones(me)}
        parts, records = gather_objects(own, to_all), gather_objects(Record(me), to_all)
        nothing = gather_objects(None, to_all)
        if me > 0 and not to_all:
            assert parts is None and records is None and nothing is None
            continue
        assert [part["rank"] for part in parts] == list(range(world))
        assert all(
            len(p["long"]) == 1000 * r == 1000 * len(p["tensor"]) for r, p in enumerate(parts)
        )
        assert [type(each) is Record and each.rank for each in records] == [*range(world)]
        assert nothing == [None] * world


def check_objects_travel_on_the_cpu_whatever_the_default_device_is():
    me, own = dist.get_rank(), torch.ones(3)
    with torch.device("meta"):  # has no data, so sending a tensor made there fails
        assert broadcast_object({"from": me})["from"] == 0
        assert gather_objects(me, to_all=True) == list(range(dist.get_world_size()))
        parts = gather_tensors(own, to_all=True)
    assert all(torch.equal(part, own) for part in parts)


def check_objects_may_hold_tensors_that_torch_cannot_pickle():
    me = dist.get_rank()
    for dtype in (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex32):
        for shape in [(), (2, 3)]:
            parts = gather_objects(torch.full(shape, me, dtype=torch.float32).to(dtype), True)
            assert [(part.dtype, part.shape) for part in parts] == [(dtype, shape)] * len(parts)
            assert all((p.to(torch.complex64) == rank).all() for rank, p in enumerate(parts))
    leaf = torch.ones(2).to(torch.float8_e5m2).requires_grad_()
    conjugate = torch.tensor([1 + 2j]).to(torch.complex32).conj()
    bits = torch.ones(4).to(torch.uint16)
    leaf, conjugate, one, other = broadcast_object((leaf, conjugate, bits, bits.view(2, 2)))
    assert leaf.requires_grad and conjugate.to(torch.complex64).tolist() == [1 - 2j]
    one.view(torch.int16)[3] = 7
    assert other.to(torch.int64).tolist() == [[1, 1], [1, 7]]  # tensors that shared memory still do


def check_any_rank_can_broadcast_an_object():
    me = dist.get_rank()
    for src in range(dist.get_world_size()):
        mine = {"from": me, "values": [torch.full((2,), me), None]}
        got = broadcast_object(mine if me == src else "not looked at", src)
        assert got["from"] == src and got["values"][0].tolist() == [src, src]
        assert (got is mine) == (me == src)
        assert type(broadcast_object(Record(me), src)) is Record
        assert broadcast_object(me, torch.arange(src + 1).numpy()[src]) == src  # a numpy integer
    assert broadcast_object(None) is None
    assert broadcast_object(me, True) == 1  # a bool is an int


def check_a_source_outside_the_world_is_refused_on_all_ranks():
    world = dist.get_world_size()
    for src in (7, world, -1, "0", 0.0):
        error = str(raised(ValueError, lambda s=src: broadcast_object("x", s)))
        assert f"from 0 to {world - 1}" in error and repr(src) in error
    assert broadcast_object("x", world - 1) == "x"


def check_a_barrier_waits_for_all_ranks():
    me, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    if me == world - 1:
        time.sleep(0.3)
        store.set("last has called", "yes")
    barrier()
    assert store.check(["last has called"])


def check_a_gather_costs_rank_0_little_beyond_its_result():
    """Each rank sends 32 MiB. Only rank 0 receives them, so no other rank needs memory for them."""
    me, world, nbytes = dist.get_rank(), dist.get_world_size(), 2**25
    part = torch.ones(nbytes // 4)
    gather_tensors(part[:10])
    before = _peak_memory()
    parts = gather_tensors(part)
    extra = _peak_memory() - before
    assert extra < (nbytes * (world + 0.5) if me == 0 else nbytes / 2), extra
    assert (parts is None) == (me > 0)


def check_a_gather_of_rows_costs_rank_0_the_whole_and_two_more_parts():
    me, world, nbytes = dist.get_rank(), dist.get_world_size(), 2**25
    part = torch.ones(nbytes // 4, 1)
    gather_rows(part[:10], 10 * world)
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _peak_memory()
    whole = gather_rows(part, len(part) * world)
    extra = _peak_memory() - before
    assert extra < (nbytes * (world + 2.25) if me == 0 else nbytes / 2), extra
    assert whole is None if me else len(whole) == len(part) * world


def check_packing_takes_memory_for_one_copy_of_the_object():
    """torch.save would take two or three times the size of an object with arrays and tensors."""
    size = 2**24
    value = {
        "tensor": torch.ones(size // 4),
        "array": np.ones(size, np.uint8),
        "bytes": b"x" * size,
        "list": [torch.ones(size // 40) for _ in range(10)],
    }
    pack_object(value["list"][:1])
    before = _peak_memory()
    packed = pack_object(value)
    extra = _peak_memory() - before
    assert extra < 1.25 * 4 * size, extra
    copy = pickle.loads(packed)
    assert torch.equal(copy["tensor"], value["tensor"]) and copy["bytes"] == value["bytes"]


def check_packing_a_view_sends_only_its_part_of_the_tensor():
    whole = torch.arange(1e6)
    values = {"whole": whole[:6], "part": whole[10:12].requires_grad_(), "strided": whole[:9:3]}
    packed = pack_object(values)
    assert len(packed) < 4000
    copies = pickle.loads(packed)
    assert all(torch.equal(copies[name], tensor) for name, tensor in values.items())
    assert copies["part"].requires_grad and not copies["strided"].requires_grad
    table = torch.zeros(2, 3)
    one, other, empty = pickle.loads(pack_object((table, table.t(), table[:0])))
    one[1, 2] = 7
    assert other[2, 1] == 7 and empty.shape == (0, 3)  # tensors that shared memory still do


def check_a_copy_of_a_cuda_tensor_is_freed_once_it_is_written():
    """A pickler keeps all buffers that it has seen, here CPU copies that nothing else needs."""
    array = np.ones(10**6)
    data = pickle.PickleBuffer(array)
    pickle.Pickler(PickleFile(), 5).dump([data, data])
    raised(ValueError, data.raw)


def _peak_memory():
    """Return the highest resident size so far in bytes; macOS counts in bytes, Linux in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    run_checks(globals())
