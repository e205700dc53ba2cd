"""Check on every rank what on_rank and rank_first promise. test_on_rank.py runs this script."""

import itertools
import re
import threading
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_checks import raised, run_checks

from ddp_ref.decorators import on_rank, rank_first
from ddp_ref.initialize import cleanup_ddp, initialize_ddp


class ScriptError(Exception):
    """An exception class of this script. Every rank must be able to catch it as this very class."""


class TwoArguments(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def subsets():
    last = dist.get_world_size() - 1
    return [{1}, {0, last}, {*range(last + 1)}]


def assert_group_is_usable():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    assert on_rank(0, broadcast=True)(lambda: "usable")() == "usable"


def text_of(error):
    return f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", []))


def check_no_rank_returns_before_all_have_called_and_the_work_is_done():
    me, world = dist.get_rank(), dist.get_world_size()
    for ranks, late in itertools.product(subsets(), range(world)):
        name = f"{late}.{'-'.join(map(str, ranks))}"

        @on_rank(ranks)
        def work(name=name):
            time.sleep(0.02 * me)
            Path(f"{name}.{me}.done").touch()

        if me == late:
            time.sleep(0.1)
            Path(f"{name}.called").touch()
        work()
        assert Path(f"{name}.called").exists()
        assert all(Path(f"{name}.{rank}.done").exists() for rank in ranks)


def check_broadcast_returns_the_result_everywhere():
    me = dist.get_rank()
    for ranks in subsets():
        work = on_rank(ranks, broadcast=True)(lambda: {"from": dist.get_rank(), "x": torch.ones(3)})
        result = work()
        assert result["from"] == (me if me in ranks else min(ranks))
        assert torch.equal(result["x"], torch.ones(3))
    assert on_rank(0, broadcast=True)(lambda: None)() is None


def check_a_result_that_cannot_be_sent_is_an_error_on_all_ranks():
    for rank in range(dist.get_world_size()):
        assert on_rank(rank)(threading.Lock)() is None or dist.get_rank() == rank
        error = raised(TypeError, on_rank(rank, broadcast=True)(threading.Lock))
        assert "lock" in str(error) and f"rank {rank}" in text_of(error)
    assert_group_is_usable()


def check_an_exception_is_raised_on_all_ranks_with_type_rank_and_traceback():
    for ranks in subsets():

        @on_rank(ranks)
        def fail_here(kind, *args):
            raise kind(*args)

        for kind, *args in [(ScriptError, "no"), (SystemExit, 7), (KeyboardInterrupt,)]:
            error = raised(kind, fail_here, kind, *args)
            first = f"raised on rank {min(ranks)} in" if len(ranks) == 1 else "raised on rank"
            assert error.args == tuple(args) and first in text_of(error)
            if dist.get_rank() not in ranks:
                assert "in fail_here" in text_of(error)
    everyone = range(dist.get_world_size())
    for bad in everyone:  # all ranks execute, and one fails
        call = on_rank(everyone)(lambda bad=bad: 1 / (dist.get_rank() - bad))
        assert f"raised on rank {bad} in" in text_of(raised(ZeroDivisionError, call))
    assert_group_is_usable()


def check_an_exception_that_cannot_be_unpickled_keeps_its_name_and_text():
    for rank in range(dist.get_world_size()):

        @on_rank(rank)
        def fail(kind, *args):
            raise kind(*args)

        mine = dist.get_rank() == rank  # a rank that fails raises its own exception
        error = raised(TwoArguments if mine else RuntimeError, fail, TwoArguments, "this", "that")
        assert mine or "TwoArguments: this and that" in str(error)
        assert f"raised on rank {rank} in" in text_of(error)
    assert_group_is_usable()


def check_a_rank_outside_the_world_is_an_error_on_all_ranks():
    world = dist.get_world_size()
    for ranks in (world, -1, [0, world], range(0)):
        work = on_rank(ranks)(lambda: None)
        assert f"0 to {world - 1}" in str(raised(ValueError, work))
    raised(ValueError, rank_first(world).__enter__)
    assert_group_is_usable()


def check_ranks_in_different_calls_get_an_error():
    me, everyone = dist.get_rank(), range(dist.get_world_size())

    def one():
        pass

    def two():
        pass

    def block_first(early):
        if early:
            with rank_first():
                return
        with rank_first():
            return

    for first, other in itertools.product(everyone, repeat=2):
        call = on_rank(0)(two) if me == other else on_rank(first)(one)
        error = str(raised(RuntimeError, call))
        for name in ("one", "two"):
            assert re.search(rf"rank \d in \S+{name} \(line \d+\) on rank", error)
        assert "the same order" in error
    for other in everyone:  # the same function, but for different ranks
        raised(RuntimeError, on_rank(int(me == other))(one))
        raised(RuntimeError, block_first, me == other)  # two blocks on different lines
    assert_group_is_usable()


def check_a_call_inside_a_running_body_exchanges_nothing_also_in_a_thread():
    me, last = dist.get_rank(), dist.get_world_size() - 1
    for ranks, inner_ranks in itertools.product(subsets(), repeat=2):

        @on_rank(inner_ranks, True, broadcast=True)
        def inner():
            return "inner"

        @on_rank(ranks)
        def outer(inner=inner):
            results = [inner()]
            with rank_first(last):
                thread = threading.Thread(target=lambda: results.append(inner()))
                thread.start()
                thread.join()
            return results

        expected = ["inner" if me in inner_ranks else None] * 2
        assert outer() == (expected if me in ranks else None)
    assert_group_is_usable()


def check_barrier_adds_a_barrier_of_the_default_group():
    with patch.object(dist, "barrier", wraps=dist.barrier) as barrier:
        on_rank(0)(int)()
        assert barrier.call_count == 0
        on_rank(0, True)(int)()
        assert barrier.call_count == 1


def check_rank_first_goes_first():
    for first in range(dist.get_world_size()):
        if dist.get_rank() == first:
            time.sleep(0.1)
        with rank_first(first):
            if dist.get_rank() == first:
                time.sleep(0.1)
                Path(f"first{first}").touch()
            assert Path(f"first{first}").exists()


def check_an_exception_on_the_first_rank_is_raised_instead_of_running_the_block():
    """That of a later rank is raised there only."""
    me, last = dist.get_rank(), dist.get_world_size() - 1
    ran = []

    def fail_in_block(first, kind):
        with rank_first(first):
            ran.append(first)
            raise kind("no")

    for first in range(last + 1):
        for kind in (LookupError, SystemExit, KeyboardInterrupt):
            error = raised(kind, fail_in_block, first, kind)
            assert f"raised on rank {first}" in text_of(error)
    assert ran == [me] * 3

    def fail_on_the_last():
        with rank_first(0):
            if me == last:
                raise LookupError("mine alone")

    raised(LookupError, fail_on_the_last) if me == last else fail_on_the_last()
    assert_group_is_usable()


def check_on_rank_works_without_a_group_and_in_a_new_one():
    cleanup_ddp()
    assert on_rank(0)(lambda: "alone")() == "alone"
    initialize_ddp()
    assert_group_is_usable()


if __name__ == "__main__":
    run_checks(globals())
