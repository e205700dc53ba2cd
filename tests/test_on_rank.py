"""on_rank and rank_first: the contract, on real ranks, in one process, and at decoration."""

import functools
import inspect
import resource
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_checks import check_passes, checks, on_ranks

from ddp_ref import initialize_ddp, run_ranks
from ddp_ref.decorators import on_rank, rank_first

SCRIPT = "on_rank_checks.py"


@pytest.mark.parametrize("name", checks(SCRIPT))
@pytest.mark.parametrize(
    "launch", [on_ranks(SCRIPT, 2, "--foreign"), on_ranks(SCRIPT, 3, fresh=True)]
)
def test_on_ranks(name, launch):
    check_passes(launch, name)


@pytest.fixture(params=["no group", "a group of one"])
def alone(request, tmp_path):
    if request.param == "a group of one":
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_alone_it_is_the_function(alone):
    @on_rank(0, True, broadcast=True, max_wait=timedelta(seconds=1))
    def double(x, *, plus=0):
        return 2 * x + plus

    assert double(3, plus=1) == 7
    assert on_rank([0])(lambda: on_rank(0)(lambda: "inner")())() == "inner"
    with rank_first():
        assert double(1) == 2


def test_alone_an_exception_is_as_it_was(alone):
    class Local(Exception):
        pass

    @on_rank(0)
    def fail():
        raise Local("here")

    with pytest.raises(Local) as caught:
        fail()
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(Local), rank_first():
        raise Local


@pytest.mark.parametrize("rank", [1, -1, [0, 1], []])
def test_alone_another_rank_is_outside_the_world(alone, rank):
    with pytest.raises(ValueError, match="0 to 0"):
        on_rank(rank)(lambda: None)()


def test_it_keeps_name_signature_and_docstring():
    @on_rank(0)
    def save(model, path: str = "model.pt", *, force: bool = False) -> int:
        """Save it."""

    assert save.__name__ == "save" and save.__doc__ == "Save it."
    assert (
        str(inspect.signature(save))
        == "(model, path: str = 'model.pt', *, force: bool = False) -> int"
    )


def generator():
    yield 1


async def coroutine():
    return 1


async def async_generator():
    yield 1


@pytest.mark.parametrize("func", [generator, coroutine, async_generator])
def test_what_runs_after_its_call_is_refused(func):
    with pytest.raises(TypeError, match=f"{func.__name__} is a .* function"):
        on_rank(0)(func)
    with pytest.raises(TypeError, match="function"):
        on_rank(0)(functools.partial(func))


def test_an_object_that_is_called_like_a_generator_is_refused():
    class Job:
        def __call__(self):
            yield

    with pytest.raises(TypeError, match="Job is a generator function"):
        on_rank(0)(Job())


@pytest.mark.parametrize("order", [staticmethod, classmethod])
def test_on_rank_goes_below_staticmethod_and_classmethod(order):
    with pytest.raises(TypeError, match=f"below @{order.__name__}"):
        on_rank(0)(order(lambda: None))


@pytest.mark.parametrize("rank", [None, 0.0, "0", [0, "1"], {0: 1}, print])
def test_a_rank_is_an_integer(rank):
    with pytest.raises(TypeError, match="on_rank takes a rank"):
        on_rank(rank)


def test_max_wait_is_a_timedelta():
    with pytest.raises(TypeError, match="timedelta"):
        on_rank(0, max_wait=30)
    with pytest.raises(TypeError, match="above 0"):
        on_rank(0, max_wait=timedelta(0))


def test_a_rank_that_cannot_take_what_was_sent_says_so():
    def work():
        initialize_ddp()
        if dist.get_rank() == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, -1))
        on_rank(0, broadcast=True)(lambda: bytes(2**28))()

    with pytest.raises(RuntimeError, match=r"what rank 0 sent .* cannot be taken: MemoryError"):
        run_ranks(work, timeout=timedelta(seconds=60))


class Calling(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return on_rank(0, broadcast=True)(lambda: index)()


def test_a_process_forked_from_a_rank_is_told_so():
    def work():
        initialize_ddp()
        loader = torch.utils.data.DataLoader(Calling(), num_workers=1, timeout=30)
        with pytest.raises(RuntimeError, match=r"forked from rank .* in the ranks themselves"):
            next(iter(loader))

    run_ranks(work, timeout=timedelta(seconds=60))
