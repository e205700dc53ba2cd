"""Check on every rank what on_rank and rank_first promise. test_on_rank.py runs this script."""

import gc
import itertools
import operator
import re
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rank_checks import raised, run_checks

from ddp_ref.decorators import on_rank, rank_first
from ddp_ref.initialize import cleanup_ddp, initialize_ddp, open_group

SOON = timedelta(seconds=0.3)


class ScriptError(Exception):
    """An exception class of this script. Every rank must be able to catch it as this very class."""


class TwoArguments(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def subsets():
    world = range(dist.get_world_size())
    return [set(s) for n in world for s in itertools.combinations(world, n + 1)]


def assert_group_is_usable():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    assert on_rank(0, broadcast=True)(lambda: "usable")() == "usable"


def wait_for(file):
    while not Path(file).exists():
        time.sleep(0.01)


def text_of(error):
    return f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", []))


def check_all_ranks_wait_for_the_end_of_the_work():
    for ranks in subsets():
        name = "-".join(map(str, ranks))

        @on_rank(ranks)
        def work(name=name):
            time.sleep(0.1 * dist.get_rank())
            Path(f"{name}.{dist.get_rank()}.done").touch()

        work()
        assert all(Path(f"{name}.{rank}.done").exists() for rank in ranks)


def check_no_rank_returns_before_all_have_called():
    for late in range(dist.get_world_size()):
        if dist.get_rank() == late:
            time.sleep(0.2)
            Path(f"late{late}").touch()
        on_rank(0)(lambda: None)()
        assert Path(f"late{late}").exists()


def check_broadcast_returns_the_result_everywhere():
    me = dist.get_rank()
    for ranks in subsets():
        work = on_rank(ranks, broadcast=True)(lambda: {"from": dist.get_rank(), "x": torch.ones(3)})
        result = work()
        assert result["from"] == (me if me in ranks else min(ranks))
        assert torch.equal(result["x"], torch.ones(3))
    assert on_rank(0, broadcast=True)(lambda: None)() is None
    large = on_rank(0, broadcast=True)(lambda: torch.arange(2_000_000))()
    assert torch.equal(large, torch.arange(2_000_000))


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

        first = f"raised on rank {min(ranks)} in" if len(ranks) == 1 else "raised on rank"
        for kind, args in [(ScriptError, ("no",)), (KeyError, ("no", 1)), (OSError, ())]:
            error = raised(kind, fail_here, kind, *args)
            assert error.args == args and first in text_of(error)
            if dist.get_rank() not in ranks:
                assert "in fail_here" in text_of(error)
        error = raised(SystemExit, fail_here, SystemExit, 7)
        assert error.code == 7 and first in text_of(error)
        assert first in text_of(raised(KeyboardInterrupt, fail_here, KeyboardInterrupt))
    assert_group_is_usable()


def check_an_exception_that_cannot_be_unpickled_keeps_its_name_and_text():
    class Local(Exception):
        pass

    for rank in range(dist.get_world_size()):

        @on_rank(rank)
        def fail(kind, *args):
            raise kind(*args)

        error = raised(RuntimeError, fail, TwoArguments, "this", "that")
        assert "TwoArguments: this and that" in str(error)
        assert f"raised on rank {rank} in" in text_of(error)
        if dist.get_rank() == rank:
            assert type(error.__cause__) is TwoArguments
        local = raised(RuntimeError, fail, Local, "here")  # it cannot be pickled
        assert "Local: here" in str(local)
        # Longer than the store takes at once; a character may take four bytes.
        assert "Local: \N{OWL}" in str(raised(RuntimeError, fail, Local, "\N{OWL}" * 2**21))
    assert_group_is_usable()


def check_an_exception_that_python_cannot_print_is_raised_on_all_ranks():
    def fail():
        raise SyntaxError("bad", ("file", 1, 1, b"no text"))  # the traceback module expects a str

    assert raised(SyntaxError, on_rank(0, max_wait=timedelta(seconds=20))(fail)).msg == "bad"
    assert_group_is_usable()


def check_local_variables_of_a_failed_body_are_freed_with_its_exception():
    """The garbage collector is off: a frame that held its exception would keep both alive."""
    references = []

    def fail():
        local = ScriptError("held by the body's frame")
        references.append(weakref.ref(local))
        raise LookupError("no")

    def fail_in_block():
        with rank_first():
            fail()

    gc.disable()
    try:
        for call in (on_rank(0)(fail), on_rank(range(dist.get_world_size()))(fail), fail_in_block):
            raised(LookupError, call)
    finally:
        gc.enable()
    assert [reference() for reference in references] == [None] * len(references)
    assert len(references) == (3 if dist.get_rank() == 0 else 1)


def check_one_failure_among_several_executing_ranks_is_raised_on_all_ranks():
    everyone = range(dist.get_world_size())
    for bad in everyone:

        @on_rank(everyone)
        def work(bad=bad):
            if dist.get_rank() == bad:
                raise ValueError(f"from {bad}")

        assert str(raised(ValueError, work)) == f"from {bad}"
    assert_group_is_usable()


def check_a_rank_outside_the_world_is_an_error_on_all_ranks():
    world = dist.get_world_size()
    for ranks in (world, -1, [0, world], [], (), set(), range(0)):
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

    def block_first(early=True):
        if early:
            with rank_first():
                return
        with rank_first():
            return

    for first, second in itertools.product(everyone, repeat=2):
        other = (first + second) % len(everyone)
        call = on_rank(second)(two) if me == other else on_rank(first)(one)
        error = raised(RuntimeError, call)
        for name in ("one", "two"):
            assert re.search(rf"rank \d in \S+{name} \(line \d+\) on rank", str(error))
        assert "the same order" in str(error)
    for other in everyone:  # the same function, but for different ranks
        raised(RuntimeError, on_rank(int(me == other))(one))
        raised(RuntimeError, block_first if me == other else on_rank(0)(one))
        raised(RuntimeError, block_first, me == other)  # two blocks on different lines
    assert_group_is_usable()


def check_a_call_inside_a_running_body_exchanges_nothing():
    me = dist.get_rank()
    everyone = range(dist.get_world_size())
    for ranks in subsets():
        for inner_ranks in subsets():

            @on_rank(inner_ranks, True, broadcast=True, max_wait=SOON)
            def inner():
                return "inner"

            @on_rank(ranks)
            def outer(inner=inner):
                first = inner()
                with rank_first(everyone[-1]):
                    return first, inner()

            expected = ("inner" if me in inner_ranks else None,) * 2
            assert outer() == (expected if me in ranks else None)
    assert_group_is_usable()


def check_a_call_from_a_thread_of_a_running_body_exchanges_nothing():
    inner = on_rank(0)(dist.get_rank)

    @on_rank(0, broadcast=True)
    def outer():
        results = []
        thread = threading.Thread(target=lambda: results.append(inner()))
        thread.start()
        thread.join()
        return results

    assert outer() == [0]


def check_methods():
    class Model:
        def __init__(self):
            self.seen = []

        @on_rank(0)
        def instance(self, value):
            self.seen.append(value)
            return self, value

        @classmethod
        @on_rank(0, broadcast=True)
        def on_class(cls, value):
            return cls.__name__, value

    class Child(Model):
        pass

    here = dist.get_rank() == 0
    model = Child()
    assert model.instance(1) == ((model, 1) if here else None)
    assert model.seen == ([1] if here else [])
    assert model.on_class(2) == Child.on_class(2) == ("Child", 2)


def check_barrier_adds_a_barrier_of_the_default_group():
    calls = []
    original = dist.barrier
    dist.barrier = lambda *args, **kwargs: [calls.append(1), original(*args, **kwargs)]
    try:
        on_rank(0)(int)()
        assert calls == []
        on_rank(0, True)(int)()
        on_rank(0, barrier=True)(int)()
        assert calls == [1, 1]
        raised(ValueError, on_rank(0, barrier=True)(lambda: int("no")))
        assert calls == [1, 1]
    finally:
        dist.barrier = original


def check_max_wait_ends_the_wait_and_names_the_rank():
    me, everyone = dist.get_rank(), range(dist.get_world_size())
    for worker in everyone:

        @on_rank(worker, broadcast=True, max_wait=None if me == worker else SOON)
        def slow(worker=worker):
            for rank in everyone:
                if rank != worker:
                    wait_for(f"gave_up.{worker}.{rank}")
            return bytes(3 * 2**20)

        if me == worker:
            assert slow() == bytes(3 * 2**20)
        else:
            error = raised(TimeoutError, slow)
            assert f": rank {worker} not ready within max_wait=0:00:00.3" in str(error)
            Path(f"gave_up.{worker}.{me}").touch()
        for number in range(3):  # the late result is not taken for another one
            assert on_rank(worker, broadcast=True)(operator.abs)(number) == number
    assert_group_is_usable()


def check_calls_leave_no_keys_behind():
    """Each call deletes the keys of the one before, also of one that failed."""
    store = open_group().store

    def fail():
        raise ValueError("no")

    def keys():
        on_rank(0)(int)()
        dist.barrier()
        count = store.num_keys()
        dist.barrier()
        return count

    before = keys()
    for _ in range(20):
        on_rank(0, broadcast=True)(int)()
        raised(ValueError, on_rank(0)(fail))
    assert keys() == before


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
    for first in range(dist.get_world_size()):
        for kind in (LookupError, SystemExit, KeyboardInterrupt, StopIteration):
            ran = []
            try:
                with rank_first(first):
                    ran.append(True)
                    raise kind("no")
            except BaseException as error:  # noqa: BLE001 - asserted
                assert type(error) is kind or (
                    kind is StopIteration and type(error) is RuntimeError
                ), error
                assert f"raised on rank {first}" in text_of(error) or kind is StopIteration
            else:
                raise AssertionError("nothing was raised")
            assert bool(ran) == (dist.get_rank() == first)
    assert_group_is_usable()


def check_an_exception_on_a_later_rank_is_raised_only_there():
    last = dist.get_world_size() - 1
    try:
        with rank_first(0):
            if dist.get_rank() == last:
                raise LookupError("mine alone")
    except LookupError:
        assert dist.get_rank() == last
    else:
        assert dist.get_rank() != last
    assert_group_is_usable()


def check_on_rank_works_without_a_group_and_in_a_new_one():
    cleanup_ddp()
    assert on_rank(0)(lambda: "alone")() == "alone"
    initialize_ddp()
    assert_group_is_usable()


if __name__ == "__main__":
    run_checks(globals())
