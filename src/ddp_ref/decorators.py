"""Run a function on some ranks while the others wait, or on every device."""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from .collectives import pack_object, unpack_object
from .initialize import side_group
from .outcomes import settle

P = ParamSpec("P")
R = TypeVar("R")
Ranks = int | list[int] | tuple[int, ...] | set[int] | range

_body = Lock()  # held while a body runs: the other ranks wait for it, so nothing can be exchanged


def on_rank(
    rank: Ranks,
    barrier: bool = False,
    *,
    broadcast: bool = False,
    max_wait: timedelta | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Run the decorated function on `rank` (or several) while all others wait for its end.

    The function becomes collective: all ranks call it, in the same order as all on_rank functions,
    each from one thread at a time. A rank that leaves out one of several calls of one function is
    not noticed: it then takes the next call's part.
    It may take longer than the group's timeout. It returns its result on the ranks that ran it and
    None elsewhere; with `broadcast` the result of the lowest of them comes back elsewhere too,
    pickled, its CUDA tensors on the receiver's own device (the CPU where there is none).

    An exception is raised on all ranks with its original type, rank and traceback; of several, the
    lowest rank's, the others as notes. One whose type does not survive pickling becomes a
    RuntimeError. The group stays usable. RuntimeError names a rank that died (at once, unless
    children that it forked still hold its sockets) or is in another call.

    `max_wait` (timedelta) bounds the wait for other ranks, not the work: past it, TimeoutError. No
    rank returns before all have called; `barrier` adds the `dist.barrier()` of the default group,
    which under nccl waits for the GPUs too.

    Inside a running body, a call exchanges nothing and runs where this rank is listed; ordinary
    collectives would deadlock there. With no group open, this process is rank 0 of one. A rank
    outside the world is a ValueError; a generator or coroutine function a TypeError.
    """
    ranks = _as_ranks(rank)
    if max_wait is not None and not (isinstance(max_wait, timedelta) and max_wait > timedelta(0)):
        raise TypeError(
            f"max_wait must be a timedelta above 0, such as one minute, not {max_wait!r}"
        )

    def decorate(func: Callable[P, R]) -> Callable[P, R | None]:
        name = _name_of(func)

        @functools.wraps(func)
        def on_ranks(*args: P.args, **kwargs: P.kwargs) -> R | None:
            # All else is in a function of this module: so a decorated function can be pickled.
            work = functools.partial(func, *args, **kwargs)
            return _run(work, name, ranks, barrier, broadcast, max_wait)

        return on_ranks

    return decorate


def _run(
    work: Callable[[], R],
    name: str,
    ranks: tuple[int, ...],
    barrier: bool,
    broadcast: bool,
    max_wait: timedelta | None,
) -> R | None:
    """Do `work` on `ranks` and wait for its end on all; `name` tells the calls apart."""
    group, listed = _enter(ranks)
    if group is None:
        return work() if listed else None
    result, error, packed = None, None, None
    if listed:
        try:
            with _body:
                result = work()
            if broadcast and group.rank() == ranks[0]:
                packed = pack_object(result)
                unpack_object(packed)  # what cannot be unpickled is an error here, and so on all
        except BaseException as caught:  # noqa: BLE001 - raised by settle, on all ranks
            error = caught
    try:
        shared = settle(group, name, ranks, error, packed, max_wait)
    finally:
        del error  # else this frame keeps the exception, and that all the body's locals
    if barrier:
        dist.barrier()
    return result if listed or shared is None else unpack_object(shared)


def rank_first(rank: int = 0) -> AbstractContextManager[None]:
    """Run the `with` block on `rank`, then on all the others (collective: all ranks enter).

    For what one rank fetches and the others find in place. They wait however long it takes; an
    exception of the first is raised on all, and the others do not run the block. Calls of on_rank
    and rank_first inside the block exchange nothing. With no group open, the block simply runs.
    """
    caller = sys._getframe(1)
    place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    return _rank_first((operator.index(rank),), f"rank_first at {place}")


@contextmanager
def _rank_first(ranks: tuple[int, ...], name: str) -> Iterator[None]:
    group, first = _enter(ranks)
    if group is None:
        yield
        return
    error = None
    if first:
        try:
            with _body:
                yield
        except BaseException as caught:  # noqa: BLE001 - raised by settle, on all ranks
            error = caught
    try:
        settle(group, name, ranks, error)
    finally:
        del error
    if not first:
        with _body:
            yield


def _enter(ranks: tuple[int, ...]) -> tuple[dist.ProcessGroup | None, bool]:
    """Return the group to exchange over, if there is anything to exchange, and if this rank works.

    Raises ValueError, on all ranks alike, where `ranks` is empty or has one outside the world.
    """
    group = side_group()
    me, world = (group.rank(), group.size()) if group else (0, 1)
    if not ranks or ranks[0] < 0 or ranks[-1] >= world:
        listed = ", ".join(map(str, ranks)) or "none"
        raise ValueError(f"the ranks of this world are 0 to {world - 1}, not {listed}")
    return (None if world == 1 or _body.locked() else group), me in ranks


def _as_ranks(rank: Ranks) -> tuple[int, ...]:
    members = rank if isinstance(rank, list | tuple | set | frozenset | range) else [rank]
    try:
        return tuple(sorted({operator.index(member) for member in members}))
    except TypeError:
        raise TypeError(
            f"on_rank takes a rank or a list, tuple, set or range of ranks, not {rank!r}"
        ) from None


def _name_of(func: Callable[..., object]) -> str:
    """Return the name by which the ranks know `func`; refuse what does not run when called."""
    if isinstance(func, staticmethod | classmethod):
        raise TypeError(f"on_rank goes below @{type(func).__name__}, next to the function")
    if not callable(func):
        raise TypeError(f"on_rank decorates a function, not {func!r}")
    name = f"{func.__module__}.{getattr(func, '__qualname__', type(func).__qualname__)}"
    for call in (func, type(func).__call__):  # a function, or an object that is called like one
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
            raise TypeError(f"on_rank: {name} is a generator function, it runs after its call ends")
        if inspect.iscoroutinefunction(call):
            raise TypeError(f"on_rank: {name} is a coroutine function, it runs after its call ends")
    code = getattr(inspect.unwrap(func), "__code__", None)
    return f"{name} (line {code.co_firstlineno})" if code else name  # two lambdas have one name
