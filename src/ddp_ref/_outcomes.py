"""How the outcome of one on_rank call travels from the executing ranks to all others.

Each rank tells every executing rank which call it is in. An executing rank does its work, receives
these messages, and replies to each of them with its result or exception, and with any problem that
it noticed on other ranks. With one executing rank that makes 2 (N - 1) messages.

The messages go point to point over a gloo group. A broadcast would be cheaper, but in its tree only
the neighbors of a dead rank notice its death. A heartbeat cannot tell a rank that holds the GIL
from a dead one; a closed socket can. Waiting happens in threads, because the C++ calls notice
neither Ctrl-C nor `max_wait`. gloo completes a send only when the receiver takes it, so no rank
returns before all ranks have called.
"""

from __future__ import annotations  # a torch that was built without distributed has no Store

import atexit
import math
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from struct import Struct
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .initialize import OpenGroup

FOREVER = timedelta(days=365)  # the work may take as long as it likes
LOOK_AFTER = 10.0  # seconds of waiting before a rank looks for ranks in other calls
LOOK_EVERY = 1.0  # seconds between two looks
GRACE = 2.0  # seconds to collect further problems after the first; must exceed LOOK_EVERY
FRAME = 4096  # bytes of the first message; a call's name or a small result fits into it
SIZES = Struct("!QQ")  # at the beginning of a frame: the bytes of the head and of the value
WAKING_TAG = 2**31 - 1  # no call reaches this tag


class RemoteTraceback(Exception):
    """The traceback of another process. Python 3.10 has no notes, so it is shown as the cause."""


class Outcome(NamedTuple):
    """What an executing rank tells the others."""

    call: str
    failure: bytes | None = None  # its packed exception
    value: Any = None  # its packed result, a buffer
    problems: dict[int, str] | None = None  # by rank: who died, or who is in another call


@dataclass
class _Call:
    """One on_rank call on this rank: what its threads need, and the queue of their answers."""

    group: dist.ProcessGroup
    store: dist.Store
    me: int
    members: Sequence[int]
    number: int
    text: str
    awaited: int | None = None  # on an executing rank: which rank has not called yet
    over: Event = field(default_factory=Event)
    answers: SimpleQueue[tuple[int, Outcome | str]] = field(default_factory=SimpleQueue)

    def lost(self, rank: int, error: Exception) -> str:
        if not isinstance(error, RuntimeError):  # gloo's own errors all are
            cause = f"{type(error).__name__}: {error}"
            return f"what rank {rank} sent at the end of {self.text} cannot be read: {cause}"
        return f"rank {rank} died or left before the end of {self.text}; see its output ({error})"

    def differs(self, rank: int, text: str) -> str:
        return (
            f"rank {rank} is in {text}, rank {self.me} in {self.text}: every rank must make the "
            "same on_rank and rank_first calls in the same order"
        )


def wait_for_outcomes(
    opened: OpenGroup,
    name: str,
    ranks: Sequence[int],
    members: Sequence[int],
    error: BaseException | None = None,
    value: Any = None,
    max_wait: timedelta | None = None,
) -> Any:
    """Wait until the executing ranks have finished their work (collective).

    Args:
        opened: The open group with its side group.
        name: The name of the work, the same on all ranks.
        ranks: The executing ranks, in ascending order.
        members: The ranks that take part.
        error: What this rank's own work raised.
        value: What this rank's own work returned, packed into a buffer.
        max_wait: How long to wait for the others. Default: as long as it takes.

    Returns:
        The packed result of the first executing rank.

    Raises:
        BaseException: The exception of the lowest executing rank that failed, the others as notes.
        RuntimeError: If a rank died or is in another call.
        TimeoutError: If a rank has not finished within `max_wait`.
    """
    assert opened.side is not None
    number, me = next(opened.calls), opened.info.rank
    text = f"{name} (call {number})"
    call = _Call(opened.side, opened.store, me, members, number, text)
    failure = None if error is None else pack_exception(error)
    mine = Outcome(call.text, failure, value)
    outcomes, problems = _collect(call, ranks, mine, max_wait)
    if mine.failure:  # known even if no other rank answers
        outcomes.setdefault(me, mine)
    errors: dict[tuple[int, int], BaseException] = {}  # by (priority, rank): real exceptions first
    for rank, outcome in outcomes.items():
        if outcome.failure:
            errors[0, rank] = unpack_exception(outcome.failure, f"rank {rank} in {outcome.call}")
    for rank, problem in problems.items():
        errors[1 if rank in ranks else 2, rank] = RuntimeError(problem)
    if error is not None:
        errors[0, me] = _own(error, errors[0, me], f"raised on rank {me} in {call.text}")
        error = None  # a frame that holds its own exception keeps the work's locals alive
    late = [rank for rank in ranks if rank not in outcomes]
    if late and not errors:
        names = ", ".join(map(str, late))
        cause = (
            f"rank {names} has not finished {call.text}, or waits for a rank that has not called"
        )
        if me in late:
            cause = f"rank {call.awaited} has not called {call.text}"
        raise TimeoutError(
            f"max_wait={max_wait} is over and {cause}: look at its output, or pass a longer "
            "max_wait (None waits as long as it takes)"
        )
    if errors:
        _raise_first([errors.pop(key) for key in sorted(errors)])
    return outcomes[ranks[0]].value if ranks else None


def _collect(
    call: _Call, ranks: Sequence[int], mine: Outcome, max_wait: timedelta | None
) -> tuple[dict[int, Outcome], dict[int, str]]:
    """Start one thread per executing rank; return the outcomes, and what is wrong by rank."""
    threads = [
        Thread(target=_answer_all, args=(call, mine), daemon=True)
        if rank == call.me
        else Thread(target=_ask, args=(call, rank), daemon=True)
        for rank in ranks
    ]
    outcomes: dict[int, Outcome] = {}
    problems: dict[int, str] = {}
    now = time.monotonic()
    look_at, deadline = now + LOOK_AFTER, now + (max_wait.total_seconds() if max_wait else math.inf)
    try:
        for thread in threads:
            thread.start()
        while set(ranks) - outcomes.keys() - problems.keys() and now < deadline:
            with suppress(Empty):  # in short steps: on Windows, Ctrl-C is felt between them only
                rank, answer = call.answers.get(timeout=min(deadline - now, 0.2))
                if isinstance(answer, str):
                    problems.setdefault(rank, answer)
                else:
                    outcomes[rank] = answer
                    problems |= {r: p for r, p in (answer.problems or {}).items() if r != call.me}
                    if answer.call != call.text:
                        problems[rank] = call.differs(rank, answer.call)
                if problems:
                    deadline = min(deadline, time.monotonic() + GRACE)
            now = time.monotonic()
            if now > look_at:
                # The store may be hosted by a frozen rank, so this needs a thread as well.
                Thread(target=_look_for_other_calls, args=(call,), daemon=True).start()
                look_at = math.inf
    finally:
        call.over.set()
        if set(ranks) - outcomes.keys():
            atexit.register(_wake, call, threads)
        else:
            for thread in threads:  # they are at their last lines
                thread.join()
    return outcomes, problems


def _ask(call: _Call, executor: int) -> None:
    """Tell `executor` which call this rank is in, and wait for its outcome."""
    try:
        _send(call, executor, 2 * call.number, call.text.encode())
        head, value = _receive(call, executor, 2 * call.number + 1)
        answer: Outcome | str = pickle.loads(head)._replace(value=value or None)
    except Exception as error:  # noqa: BLE001 - e.g. no memory for the result; the main thread tells
        answer = call.lost(executor, error)
    call.answers.put((executor, answer))


def _answer_all(call: _Call, mine: Outcome) -> None:
    """Receive from every other rank which call it is in, then send each of them the outcome."""
    peers = [rank for rank in call.members if rank != call.me]
    problems: dict[int, str] = {}
    for peer in peers:
        call.awaited = peer
        try:
            text = _receive(call, peer, 2 * call.number)[0].decode()
            if text != call.text:
                problems[peer] = call.differs(peer, text)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            problems[peer] = call.lost(peer, error)
    head = pickle.dumps(mine._replace(value=None, problems=dict(problems)))
    for peer in peers:
        try:
            _send(call, peer, 2 * call.number + 1, head, mine.value or b"")
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            problems.setdefault(peer, call.lost(peer, error))
    call.answers.put((call.me, mine._replace(problems=problems)))


def _look_for_other_calls(call: _Call) -> None:
    """Compare calls through the store until the wait is over.

    Ranks that wait for different executing ranks never exchange a message. So after some seconds
    each rank compares its call with the first one that was written to the store for this number.
    If they differ, it writes its own call under a second key, which every rank can read.
    """
    first, other = (f"ddp_ref/waiting/{call.number}/{which}" for which in ("first", "other"))
    store, mine = call.store, f"{call.me} {call.text}"
    with suppress(Exception):  # not every store can compare, and its host may be gone
        lines = [store.compare_set(first, "", mine)]
        if not lines[0].decode().endswith(f" {call.text}"):
            store.set(other, mine)
        while not call.over.wait(LOOK_EVERY):
            seen = [*lines, store.get(other)] if store.check([other]) else lines
            for rank, _, text in (line.decode().partition(" ") for line in seen):
                if text != call.text:
                    call.answers.put((int(rank), call.differs(int(rank), text)))


def _send(call: _Call, peer: int, tag: int, head: bytes, value: Any = b"") -> None:
    """Send `head` and `value`: in one message if they fit into a frame, otherwise in several."""
    room = FRAME - SIZES.size
    fits = len(head) + len(value) <= room
    start = head + bytes(value) if fits else head[:room]
    frame = bytearray(SIZES.pack(len(head), len(value)) + start).ljust(FRAME, b"\0")
    for part in (frame,) if fits else (frame, bytearray(head[room:]), value):
        if len(part):
            call.group.send([_tensor(part)], peer, tag).wait(FOREVER)


def _receive(call: _Call, peer: int, tag: int) -> tuple[bytearray, bytearray]:
    """Wait for what `peer` sends with `tag`; return the head and the value."""
    frame = bytearray(FRAME)
    call.group.recv([_tensor(frame)], peer, tag).wait(FOREVER)
    head_size, value_size = SIZES.unpack_from(frame)
    start = frame[SIZES.size :]
    if head_size + value_size <= len(start):
        return start[:head_size], start[head_size : head_size + value_size]
    rest, value = bytearray(max(0, head_size - len(start))), bytearray(value_size)
    for part in (rest, value):
        if part:
            call.group.recv([_tensor(part)], peer, tag).wait(FOREVER)
    return start[:head_size] + rest, value


def _tensor(buffer: Any) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _wake(call: _Call, threads: Sequence[Thread]) -> None:
    """At exit, end the threads of a wait that was given up.

    A thread that returns from C++ after Python has gone aborts the process (up to Python 3.13). A
    receive that times out closes all connections of its group, and so wakes the threads now.
    """
    waiting = [thread for thread in threads if thread.is_alive()]
    for peer in call.members if waiting else []:
        if peer != call.me:
            with suppress(RuntimeError):
                work = call.group.recv([_tensor(bytearray(1))], peer, WAKING_TAG)
                work.wait(timedelta(milliseconds=1))
    for thread in waiting:
        thread.join(1)


def pack_exception(
    error: BaseException, dumps: Sequence[Callable[[Any], bytes]] = (pickle.dumps,)
) -> bytes:
    """Return `error` and its traceback as bytes, even if `error` itself cannot be pickled.

    Args:
        error: The exception. If its type does not survive pickling, only its text travels.
        dumps: Functions that pickle it, tried in order. `pickle.dumps` pickles the class by
            reference, so the receiver gets its own class and its `except` catches it.
    """
    with_name = "".join(traceback.format_exception_only(type(error), error)).strip()
    return pickle.dumps((_pickled(error, dumps), with_name, describe(error)))


def _pickled(error: BaseException, dumps: Sequence[Callable[[Any], bytes]]) -> bytes | None:
    for dump in dumps:
        with suppress(Exception):  # __reduce__ and __init__ are the user's: anything may happen
            pickled = dump(error)
            if type(pickle.loads(pickled)) is type(error):
                return pickled
    return None


def unpack_exception(packed: bytes, where: str) -> BaseException:
    """Return the exception that pack_exception packed, with its traceback as a note.

    Args:
        packed: What pack_exception returned, in another process.
        where: The name of that process, such as "rank 1".

    Returns:
        The exception, or a RuntimeError with its type's name and text if it cannot be unpickled.
    """
    pickled, with_name, trace = pickle.loads(packed)
    error: BaseException = RuntimeError(with_name)
    with suppress(Exception):  # the user's classes are loaded here: anything may happen
        error = pickle.loads(pickled) if pickled else error
    add_note(error, f"raised on {where}:\n{trace}")
    return error


def describe(error: BaseException) -> str:
    """Return `error` as Python prints it: its traceback, its text, its notes."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def add_note(error: BaseException, note: str) -> None:
    """Add `note` to `error`; on Python 3.10, show it as the exception's cause."""
    with suppress(Exception):  # an exception may refuse new attributes
        if hasattr(error, "add_note"):
            error.add_note(note)
            return
        error.__dict__.setdefault("__notes__", []).append(note)
        cause = RemoteTraceback("\n".join(error.__dict__["__notes__"]))
        old = error.__cause__
        cause.__cause__ = old.__cause__ if isinstance(old, RemoteTraceback) else old
        error.__cause__ = cause


def _own(error: BaseException, travelled: BaseException, where: str) -> BaseException:
    """Return what this rank raises for its own failure: the same type as on all other ranks."""
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
        del first, others, errors  # otherwise frame, exception and traceback form a cycle
