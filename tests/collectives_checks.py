"""What the collectives promise, checked on every rank: run by test_collectives.py."""

import math

import torch
import torch.distributed as dist
from rank_checks import raised, run_checks

from ddp_ref.collectives import (
    broadcast_object,
    gather_objects,
    gather_rows,
    gather_tensors,
    reduce_mean,
    reduce_sum,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.int64]
DTYPES += [torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]


class Record:
    """A class of the script itself: it must arrive as the receiver's own."""

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
    values = {"loss": 0.1, "big": 2.0**53 - 10 if me == 0 else 1, "tensor": torch.tensor([1.5])}
    sums = reduce_sum(values)
    assert list(sums) == ["loss", "big", "tensor"]
    assert sums["big"] == 2.0**53 - 10 + world - 1
    assert sums["tensor"] == 1.5 * world and abs(sums["loss"] - 0.1 * world) < 1e-15
    assert all(type(value) is float for value in sums.values())


def check_a_mean_is_weighted_by_the_samples():
    me, world = dist.get_rank(), dist.get_world_size()
    count = 10 * me + 1
    total = sum(10 * rank + 1 for rank in range(world))
    means = reduce_mean({"loss": float(me), "one": 1}, count)
    assert means["loss"] == sum(rank * (10 * rank + 1) for rank in range(world)) / total
    assert means["one"] == 1


def check_known_names_are_one_packed_all_reduce():
    for function, count in [(reduce_sum, ()), (reduce_mean, (2,))]:
        values = {"a": 1.0, "b": 2.0, "c": 3.0}
        for names, gathers in [(["a", "b", "c"], 0), (None, 1)]:
            call = lambda f=function, n=names, c=count: f(values, *c, names=n)  # noqa: B023, E731
            assert counted("all_reduce", call)[1] == 1
            assert counted("all_gather_object", call)[1] == gathers


def check_a_rank_with_nothing_takes_part():
    me, world = dist.get_rank(), dist.get_world_size()
    for empty in range(world):
        for names in (None, ["b", "a"]):
            values = {} if me == empty else {"a": 1.0, "b": float(me)}
            others = [rank for rank in range(world) if rank != empty]
            sums = reduce_sum(values, names=names)
            assert sums == {"a": world - 1, "b": sum(others)}
            assert list(sums) == (names or ["a", "b"])
            means = reduce_mean(values, len(values), names=names)
            assert means == {"a": 1, "b": sum(others) / len(others)}
        not_a_mean = {"a": math.nan} if me == empty else {"a": 2.0}
        assert reduce_mean(not_a_mean, int(me != empty)) == {"a": 2.0}


def check_nothing_on_any_rank():
    assert reduce_sum({}) == {} and reduce_mean({}, 0) == {}
    assert math.isnan(reduce_mean({"loss": 1.0}, 0)["loss"])
    assert reduce_sum({}, names=["a"]) == {"a": 0}


def check_a_non_finite_value_is_seen_by_all():
    bad = dist.get_world_size() - 1
    for value in (math.nan, math.inf):
        loss = value if dist.get_rank() == bad else 1.0
        assert not math.isfinite(reduce_sum({"loss": loss})["loss"])
        assert not math.isfinite(reduce_mean({"loss": loss}, 1)["loss"])


def check_different_names_are_an_error_on_all():
    mine = {"loss": 1.0} if dist.get_rank() else {"loss": 1.0, "accuracy": 1.0}
    for call in (lambda: reduce_sum(mine), lambda: reduce_mean(mine, 1)):
        assert "'accuracy'" in str(raised(ValueError, call))
    raised(ValueError, lambda: reduce_sum({"loss": 1.0}, names=["accuracy"]))
    assert reduce_sum({"a": 1.0}) == {"a": dist.get_world_size()}


def check_the_order_of_the_names_may_differ():
    names = ["a", "b", "c"]
    turned = names[dist.get_rank() :] + names[: dist.get_rank()]
    sums = reduce_sum({name: names.index(name) for name in turned})
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

                parts = gather_tensors(part(me))
                if me != 0:
                    assert parts is None
                    continue
                for rank, got in enumerate(parts):
                    assert got.dtype == dtype and got.shape == part(rank).shape
                    assert torch.equal(got.to(torch.complex64), part(rank).to(torch.complex64))
    mixed = gather_tensors(torch.zeros(me + 1, dtype=DTYPES[me]))
    if me == 0:
        assert [(len(p), p.dtype) for p in mixed] == [(r + 1, DTYPES[r]) for r in range(world)]


def check_a_part_may_be_a_conjugate_or_negative_view():
    part = torch.full((3,), 1 + 2j, dtype=torch.complex64)
    for view in (part.conj(), part.conj().imag):
        parts = gather_tensors(view)
        if dist.get_rank() == 0:
            assert all(torch.equal(each, view.resolve_neg()) for each in parts)


def check_a_part_may_be_one_element_of_many():
    parts = gather_tensors(torch.arange(8.0)[dist.get_rank() :: 8])
    if dist.get_rank() == 0:
        assert torch.equal(torch.cat(parts), torch.arange(float(dist.get_world_size())))


def check_a_mean_without_values_is_refused():
    for names in (None, ["loss"]):
        try:
            reduce_mean({}, 5, names=names)
        except ValueError as error:
            assert "values are empty for 5 samples" in str(error)
        else:
            raise AssertionError("a mean of nothing over 5 samples")


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
        parts = gather_tensors(None if me == empty else torch.full((me + 1,), me))
        if me == 0:
            assert [part is None for part in parts] == [rank == empty for rank in range(world)]
            assert all(p.tolist() == [r] * (r + 1) for r, p in enumerate(parts) if r != empty)
    parts = gather_tensors(None)
    assert parts == ([None] * world if me == 0 else None)


def check_rows_arrive_dealt_in_turns():
    me, world = dist.get_rank(), dist.get_world_size()
    for shape in [(), (3,), (2, 0), (2, 200_000)]:  # the last: some messages, of one row each
        for rows in (0, 1, world, 3 * world + 1):
            whole = torch.arange(rows * math.prod(shape), dtype=torch.float32)
            whole = whole.reshape(rows, *shape)
            found = gather_rows(whole[me::world].split(2) if len(whole[me::world]) else [])
            if me:
                assert found is None
            else:
                expected = whole if rows else torch.empty(0)
                assert found.shape == expected.shape and torch.equal(found, expected)


def check_rows_may_lie_in_any_order_in_memory():
    me, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(8.0 * world * 24).reshape(8 * world, 2, 3, 4)
    last = whole.contiguous(memory_format=torch.channels_last)
    for given in (last, whole.transpose(1, 3).contiguous().transpose(1, 3)):
        for size in (1, 3, 8):  # torch.cat keeps the memory format
            found = gather_rows(given[me::world].split(size))
            assert me or torch.equal(found, whole)


def check_rows_of_two_kinds_are_refused_on_all_ranks():
    me = dist.get_rank()
    for own in ([torch.ones(2, 3 + me)], [torch.ones(2).to(DTYPES[me])]):
        error = raised(ValueError, lambda own=own: gather_rows([*own, *own]))
        assert "rows must have one shape and dtype" in str(error)


def check_objects_arrive_in_order():
    me, world = dist.get_rank(), dist.get_world_size()
    parts = gather_objects({"rank": me, "long": "x" * 1000 * me, "tensor": torch.ones(me)})
    if me == 0:
        assert [part["rank"] for part in parts] == list(range(world))
        assert all(
            len(p["long"]) == 1000 * r == 1000 * len(p["tensor"]) for r, p in enumerate(parts)
        )
    else:
        assert parts is None
    records = gather_objects(Record(me))
    assert me or [type(record) is Record and record.rank for record in records] == [*range(world)]
    assert gather_objects(None) == ([None] * world if me == 0 else None)


def check_an_object_of_any_rank_is_broadcast():
    me = dist.get_rank()
    for src in range(dist.get_world_size()):
        mine = {"from": me, "values": [torch.full((2,), me), None]}
        got = broadcast_object(mine if me == src else "not looked at", src)
        assert got["from"] == src and got["values"][0].tolist() == [src, src]
        assert (got is mine) == (me == src)
        assert type(broadcast_object(Record(me), src)) is Record
    assert broadcast_object(None) is None


if __name__ == "__main__":
    run_checks(globals())
