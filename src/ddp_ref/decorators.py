"""Run a function on some ranks while all others wait for it to finish."""

import functools
import inspect
import operator
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import ParamSpec, TypeVar

from ._outcomes import Call
from .collectives import pack_object
from .initialize import open_group, wait_for_all_ranks

P = ParamSpec("P")
R = TypeVar("R")
Ranks = int | list[int] | tuple[int, ...] | set[int] | range
Join = Callable[[], tuple[bool, Call | None]]

# Held while a body runs. The other ranks wait for that body, so nothing can be exchanged meanwhile.
_body = Lock()


def on_rank(
    rank: Ranks,
    barrier: bool = False,
    *,
    broadcast: bool = False,
    max_wait: timedelta | None = None,
    local: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Run the decorated function on `rank` while all other ranks wait until it is done.

    The function becomes collective: all ranks call it, in the same order as all other on_rank
    functions, and each rank from one thread at a time. If a rank skips one of several calls of the
    same function, nothing detects it: the rank's next call is matched with the skipped one. The
    work may take longer than the group's timeout. Inside a running body, nested on_rank calls do
    not communicate: each runs if it lists this rank. A call from another thread while a body runs
    counts as nested. Ordinary collectives would deadlock there.
    Without a process group, this process is rank 0 of a world of one.

    A call costs 2 (N - 1) small messages per executing rank. The group stays usable after an
    exception, but perhaps not after mismatched calls. Ranks that wait for different executing ranks
    detect the mismatch only through the store on rank 0, so not while rank 0 is frozen.

    Args:
        rank: The executing rank, or a list, tuple, set or range of ranks.
        barrier: Add a `dist.barrier()` of the default group, which with NCCL waits for the GPUs.
            Not with `local`. If the other ranks give up after `max_wait`, they skip this barrier,
            so end the job.
        broadcast: Return the result of the lowest executing rank on the other ranks too. It is
            pickled, and CUDA tensors in it arrive on the receiver's own device. If it cannot be
            unpickled, the receivers raise.
        max_wait: Stop waiting for other ranks after this time. It does not bound the work itself.
            None (default): no limit.
        local: `rank` means local ranks, counted on each node in the order of the ranks: the
            function runs on these ranks of every node. Each rank waits for its own node only, and
            an exception is raised on the ranks of that node. A node may leave a local call out if
            all of its ranks do.

    Returns:
        A decorator. The decorated function returns its result on the executing ranks, and None on
        the others unless `broadcast` is set.

    Raises:
        TypeError: If a rank is not an integer, or the function is a generator or coroutine.
        ValueError: If both `barrier` and `local` are set. At the call, if `rank` is empty or
            outside the world.
        RuntimeError: At the call, if a rank died, or if the ranks are in different calls. Detecting
            different calls may take 15 seconds.
        TimeoutError: At the call, if other ranks have not finished within `max_wait`.
        BaseException: If the function raises on an executing rank, all ranks raise that exception,
            with its original type, and with its rank and traceback as notes. A type that cannot be
            pickled becomes a RuntimeError.
    """
    ranks = _as_ranks(rank)
    if max_wait is not None and not (isinstance(max_wait, timedelta) and max_wait > timedelta(0)):
        raise TypeError(f"max_wait must be a timedelta above 0, not {max_wait!r}")
    if barrier and local:
        raise ValueError("barrier=True waits for all nodes, local=True for one node: choose one")

    def decorate(func: Callable[P, R]) -> Callable[P, R | None]:
        join = functools.partial(_join, _name_of(func), ranks, local, max_wait)

        @functools.wraps(func)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
            # The rest is in a function of this module, so cloudpickle can send what we decorate.
            return _run(functools.partial(func, *args, **kwargs), join, barrier, broadcast)

        return wrapper

    return decorate


def rank_first(rank: int = 0, *, local: bool = False) -> AbstractContextManager[None]:
    """Run the `with` block on `rank` first and on all other ranks afterwards (collective).

    Use it when one rank downloads or prepares what the others then find in place. They wait as
    long as it takes. If the first rank raises, all ranks raise, and the others skip the block.
    Inside the block, on_rank and rank_first exchange nothing.

    Args:
        rank: The rank that goes first.
        local: `rank` means a local rank: this rank of every node goes first on its node.

    Raises:
        TypeError: If `rank` is not an integer.
        ValueError: On entering the block, if there is no such rank.
        RuntimeError: On entering the block, if a rank died, or if the ranks are in different calls.
        BaseException: If the first rank raises in the block, all ranks raise that exception, as in
            on_rank (instead of StopIteration, the others raise a RuntimeError). What another rank
            raises in the block is raised on that rank only.
    """
    caller = sys._getframe(1)
    place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    return _rank_first(f"rank_first at {place}", operator.index(rank), local)


def _run(work: Callable[[], R], join: Join, barrier: bool, broadcast: bool) -> R | None:
    """Do `work` on the executing ranks and wait for its end on all ranks."""
    executes, call = join()
    if call is None:
        return work() if executes else None
    result = None
    with call:
        if executes:
            with _body:
                result = work()
            if broadcast and call.me == call.executors[0]:
                call.value = pack_object(result)
    if barrier:
        wait_for_all_ranks(call.opened.info.device)
    return pickle.loads(call.value) if broadcast and not executes else result


@contextmanager
def _rank_first(name: str, rank: int, local: bool) -> Iterator[None]:
    executes, call = _join(name, (rank,), local)
    if call is None:
        yield
        return
    with call:
        if executes:
            with _body:
                yield
    if not executes:
        with _body:
            yield


def _join(
    name: str, ranks: tuple[int, ...], local: bool, max_wait: timedelta | None = None
) -> tuple[bool, Call | None]:
    """Return whether this rank does the work, and the call if there is anybody to exchange with.

    Raises:
        ValueError: If the world, or with `local` the largest node, does not have these ranks.
    """
    opened = open_group()
    me, nodes = (opened.info.rank, opened.nodes) if opened else (0, [""])
    members = [rank for rank, node in enumerate(nodes) if not local or node == nodes[me]]
    count = max(map(nodes.count, set(nodes))) if local else len(nodes)
    listed = ", ".join(map(str, ranks))
    if not ranks or not set(ranks) <= set(range(count)):
        what = "local ranks" if local else "ranks of this world"
        raise ValueError(f"{name}: the {what} are 0 to {count - 1}, not {listed or 'none'}")
    executors = [members[number] for number in ranks if number < len(members)]
    if opened is None or len(members) == 1 or not executors or _body.locked():
        return me in executors, None
    text = f"{name} on {'local ' if local else ''}rank {listed}"
    return me in executors, Call(opened, text, executors, members, max_wait)


def _as_ranks(rank: Ranks) -> tuple[int, ...]:
    members = rank if isinstance(rank, list | tuple | set | frozenset | range) else [rank]
    try:
        return tuple(sorted({operator.index(member) for member in members}))
    except TypeError:
        raise TypeError(f"on_rank takes a rank, a list or a range of ranks, not {rank!r}") from None


def _name_of(func: Callable[..., object]) -> str:
    """Return the name by which all ranks know `func`; refuse what does not run when called."""
    if isinstance(func, staticmethod | classmethod):
        raise TypeError(f"put @on_rank below @{type(func).__name__}, directly above the function")
    if not callable(func):
        raise TypeError(f"on_rank decorates a function, not {func!r}")
    name = f"{func.__module__}.{getattr(func, '__qualname__', type(func).__qualname__)}"
    for kind in ("generator", "asyncgen", "coroutine"):
        runs_later = getattr(inspect, f"is{kind}function")
        if runs_later(func) or runs_later(type(func).__call__):  # an object may be called, too
            raise TypeError(f"on_rank cannot wrap the {kind} function {name}: its body runs later")
    code = getattr(inspect.unwrap(func), "__code__", None)
    return f"{name} (line {code.co_firstlineno})" if code else name  # two lambdas share one name
