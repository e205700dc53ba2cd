"""Tell every rank how a call ended on every other, point to point, and notice a rank that died.

Each rank swaps one message with every other over a gloo group, in a thread a peer. A broadcast is
cheaper, but in its tree a grandchild does not see a death. A heartbeat cannot tell a held
interpreter lock from a death; a closed socket can. As a swap ends only when both sides have come,
ranks that are in different calls meet in it, and no rank returns before all have entered.
"""

import atexit
import itertools
import math
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .errors import add_note, describe, pack_exception, unpack_exception

GRACE = 0.5  # seconds to hear which other ranks are dead or astray, once one is
WAKING_TAG = 2**31 - 1  # the largest there is; the tag of a call is its number

_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class Outcome(NamedTuple):
    """What a rank tells the others: the call it is in and, packed, what it raised or returned."""

    call: str
    failure: bytes | None
    value: bytes | None


Answers = dict[int, Outcome | Exception]  # rank -> what it told, or why nothing can come from it


def settle(
    group: dist.ProcessGroup,
    name: str,
    ranks: Sequence[int],
    error: BaseException | None = None,
    value: bytes | None = None,
    max_wait: timedelta | None = None,
) -> bytes | None:
    """Wait until `ranks` have done their work; return the `value` of the first (collective).

    `error` and `value` are what this rank's own work raised and returned. Raises the exception of
    the lowest rank, with the others as notes; without one, RuntimeError where a rank died or is in
    another call, TimeoutError where one has not come in `max_wait`. All ranks raise alike as far as
    they can know: a rank that learns of a death does not wait for what the others will raise.
    """
    me, number = group.rank(), next(_numbers.setdefault(group, itertools.count(1)))
    call = f"{name} on rank {', '.join(map(str, ranks))} (call {number})"
    # Not by value: a copied class is another class on each rank, and no `except` would catch it.
    failure = None if error is None else pack_exception(error, by_value=False)
    mine = Outcome(call, failure, value)
    answers = {me: mine} | _exchange(group, number, mine, max_wait)
    errors = _errors(answers, ranks, call)
    if error is not None:
        errors[0, me] = _own(error, errors[0, me], f"raised on rank {me} in {call}")
        error = None  # a frame that holds its exception keeps all the body's locals alive
    if not errors and (late := set(range(group.size())) - answers.keys()):
        names = ", ".join(map(str, sorted(late)))
        raise TimeoutError(f"max_wait={max_wait} is over and rank {names} has not ended {call}")
    if errors:
        _raise_first([errors.pop(key) for key in sorted(errors)])
    first = answers[ranks[0]]
    assert isinstance(first, Outcome)
    return first.value


def _exchange(
    group: dist.ProcessGroup, number: int, mine: Outcome, max_wait: timedelta | None
) -> Answers:
    """Return what the other ranks told; those that have not come in time are left out."""
    message = bytearray(pickle.dumps(mine))
    heard: SimpleQueue[tuple[int, Outcome | Exception]] = SimpleQueue()
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    threads = [
        Thread(target=_swap, args=(group, peer, number, message, heard), daemon=True)
        for peer in peers
    ]
    answers: Answers = {}
    deadline = time.monotonic() + (math.inf if max_wait is None else max_wait.total_seconds())
    try:
        for thread in threads:
            thread.start()
        while len(answers) < len(peers) and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):  # in short steps: on Windows Ctrl-C is felt between them only
                peer, answer = heard.get(timeout=min(left, 0.2))
                answers[peer] = answer
                if _problem(peer, answer, mine.call):
                    deadline = min(deadline, time.monotonic() + GRACE)
    finally:
        if len(answers) < len(peers):
            atexit.register(_wake, group, peers, threads)
        else:
            for thread in threads:  # at their last lines
                thread.join()
    return answers


def _swap(
    group: dist.ProcessGroup,
    peer: int,
    tag: int,
    message: bytearray,
    heard: SimpleQueue[tuple[int, Outcome | Exception]],
) -> None:
    """Give `message` to `peer`, take its own, and put that into `heard`.

    Runs in a thread, as C++ does not feel Ctrl-C. When the main thread gives up its wait, this one
    waits on under the tag of its call: what comes late is taken here and not by the next call.
    """
    answer: Outcome | Exception
    try:
        size, reply_size = bytearray(len(message).to_bytes(8, "big")), bytearray(8)
        sends = [group.send([_tensor(part)], peer, tag) for part in (size, message)]
        group.recv([_tensor(reply_size)], peer, tag).wait()
        reply = bytearray(int.from_bytes(reply_size, "big"))
        group.recv([_tensor(reply)], peer, tag).wait()
        for send in sends:
            send.wait()
        answer = pickle.loads(reply)
    except Exception as error:  # noqa: BLE001 - no room for the reply, say: nobody else would tell
        answer = error
    heard.put((peer, answer))


def _tensor(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _wake(group: dist.ProcessGroup, peers: list[int], threads: list[Thread]) -> None:
    """End the threads of a wait that was given up, before the interpreter goes.

    One that wakes in C++ after that aborts the process (up to Python 3.13). A receive that times
    out closes all connections of its group, which wakes them now.
    """
    waiting = [thread for thread in threads if thread.is_alive()]
    for peer in peers if waiting else []:
        with suppress(RuntimeError):
            group.recv([_tensor(bytearray(1))], peer, WAKING_TAG).wait(timedelta(milliseconds=1))
    for thread in waiting:
        thread.join(1)


def _errors(
    answers: Answers, ranks: Sequence[int], call: str
) -> dict[tuple[int, int], BaseException]:
    """Return all that went wrong by (kind, rank): first what the work raised, then who is gone."""
    errors: dict[tuple[int, int], BaseException] = {}
    for rank, answer in answers.items():
        if isinstance(answer, Outcome) and answer.failure is not None:
            errors[0, rank] = unpack_exception(answer.failure, f"rank {rank} in {answer.call}")
        if problem := _problem(rank, answer, call):
            errors[1 if rank in ranks else 2, rank] = problem
    return errors


def _problem(rank: int, answer: Outcome | Exception, call: str) -> RuntimeError | None:
    """Return what keeps `rank` from ending `call`: it died, or it is in another call."""
    if isinstance(answer, Exception) and not isinstance(answer, RuntimeError):
        what = f"{type(answer).__name__}: {answer}"
        return RuntimeError(f"what rank {rank} sent at the end of {call} cannot be taken: {what}")
    if isinstance(answer, Exception):
        return RuntimeError(
            f"rank {rank} died or left before the end of {call}; see its own output ({answer})"
        )
    if answer.call != call:
        return RuntimeError(
            f"rank {rank} is in {answer.call}, this rank in {call}: every rank must make the same "
            "on_rank and rank_first calls in the same order"
        )
    return None


def _own(error: BaseException, travelled: BaseException, where: str) -> BaseException:
    """Return what this rank raises for its own failure: the same type as all the others."""
    if type(travelled) is not type(error):
        travelled.__cause__ = error
        return travelled
    add_note(error, where)
    return error


def _raise_first(errors: list[BaseException]) -> None:
    first, *others = errors
    for other in others:
        add_note(first, f"also {describe(other)}")
    try:
        raise first
    finally:
        del first, others, errors  # a circle of frame, exception and traceback otherwise
