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

import atexit
import math
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from struct import Struct
from threading import Event, Thread
from typing import Any, NamedTuple

import torch

from .initialize import OpenGroup
from .rendezvous import start_thread

FOREVER = timedelta(days=365)  # the work may take as long as it likes
MISMATCH_CHECK_AFTER = 10.0  # seconds of waiting before a rank looks for ranks in other calls
LOOK_EVERY = 1.0  # seconds between two looks
GRACE = 2.0  # seconds to collect further problems after the first; must exceed LOOK_EVERY
FRAME = 4096  # bytes of the first message, which holds everything if there is room
SIZES = Struct("!QQ")  # at the beginning of a frame: the bytes of the head and of the value
ROOM = FRAME - SIZES.size
WAKING_TAG = 2**31 - 1  # no call reaches this tag


class RemoteTraceback(Exception):
    """The traceback of another process. Python 3.10 has no notes, so it is shown as the cause."""


class Outcome(NamedTuple):
    """What an executing rank tells the others."""

    call: str
    failure: bytes | None  # its packed exception
    problems: dict[int, str]  # by rank: who died, or who is in another call
    value: Any = b""  # its packed result: a buffer, empty if there is none


@dataclass
class Call(AbstractContextManager[Any, None]):
    """One on_rank or rank_first call on this rank: a context manager around the work.

    Every member enters it, and the executing ranks do their work in the block. At its end, all
    members wait for all of that work. If some of it failed, all of them raise its exception.

    Raises:
        BaseException: The exception of the lowest executing rank that failed, the others as notes.
        RuntimeError: If a rank died or is in another call.
        TimeoutError: If a rank has not finished within `max_wait`.
    """

    opened: OpenGroup
    name: str  # the same on all ranks
    executors: Sequence[int]  # the ranks that do the work, in ascending order
    members: Sequence[int]  # the ranks that take part: all, or those of this node
    max_wait: timedelta | None = None  # for the other ranks; None: as long as it takes
    value: Any = b""  # the packed result: this rank's, after the block the first executing rank's
    awaited: int | None = None  # on an executing rank: which rank has not called yet
    over: Event = field(default_factory=Event)
    answers: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # (rank, outcome, problems)

    def __post_init__(self) -> None:
        self.me = self.opened.info.rank
        # Nodes may differ in how many local calls they make, so those have numbers of their own.
        local, calls = len(self.members) < self.opened.info.world_size, self.opened.calls
        calls[local] += 1
        self.text = " ".join(f"{self.name} (call {calls[local]})".split())  # in one line
        self.tag = 4 * calls[local] + 2 * local  # of requests; outcomes use tag + 1
        # Ranks that share one of these keys must be in the same call.
        self.keys = [f"ddp_ref/waiting/node {self.opened.nodes[self.me]}/{sum(calls)}"]
        if not local:
            self.keys.append(f"ddp_ref/waiting/{calls[local]}")

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        failure = None if error is None else pack_exception(error)
        mine = Outcome(self.text, failure, {}, self.value)
        outcomes, problems = self._collect(mine)
        outcomes |= {self.me: mine} if failure else {}  # known even if no other rank answers
        errors: dict[tuple[int, int], BaseException] = {}  # by (priority, rank)
        for rank, outcome in outcomes.items():
            if outcome.failure:
                where = f"rank {rank} in {outcome.call}"
                errors[0, rank] = unpack_exception(outcome.failure, where)
        for rank, problem in problems.items():
            # A rank may have left because it has already raised what the other ranks are to see.
            left = problem.startswith(f"rank {rank} died or left")
            errors[1 + (rank not in self.executors) + 2 * left, rank] = RuntimeError(problem)
        if error is not None:
            if type(errors[0, self.me]) is type(error):
                errors[0, self.me] = error
                add_note(error, f"raised on rank {self.me} in {self.text}")
            else:  # all ranks raise the same type
                errors[0, self.me].__cause__ = error
            error = None  # a frame that holds its own exception keeps the work's locals alive
        if errors:
            _raise_first([errors.pop(key) for key in sorted(errors)])
        if late := [rank for rank in self.executors if rank not in outcomes]:
            awaited = self.awaited if self.me in late else late[0]
            raise TimeoutError(
                f"{self.text} has not ended within max_wait={self.max_wait}, still waiting for "
                f"rank {awaited}: see its output, or pass a longer max_wait (None: no limit)"
            )
        self.value = outcomes[self.executors[0]].value

    def _collect(self, mine: Outcome) -> tuple[dict[int, Outcome], dict[int, str]]:
        """Start one thread per executing rank; return the outcomes, and what is wrong by rank."""
        outcomes: dict[int, Outcome] = {}
        problems: dict[int, str] = {}
        now = time.monotonic()
        look_at = now + MISMATCH_CHECK_AFTER
        deadline = now + (self.max_wait.total_seconds() if self.max_wait else math.inf)
        threads = [Thread(target=self._ask, args=(r, mine), daemon=True) for r in self.executors]
        try:
            for thread in threads:  # an interrupt may come as soon as the first one runs
                thread.start()
            while set(self.executors) - outcomes.keys() - problems.keys() and now < deadline:
                with suppress(Empty):  # wait briefly: on Windows, Ctrl-C is handled between waits
                    rank, outcome, seen = self.answers.get(timeout=min(deadline - now, 0.2))
                    if outcome:
                        outcomes[rank] = outcome
                    problems = {r: text for r, text in seen.items() if r != self.me} | problems
                    if problems:
                        deadline = min(deadline, time.monotonic() + GRACE)
                now = time.monotonic()
                if now > look_at:
                    # The store may be hosted by a frozen rank, so this needs a thread as well.
                    start_thread(self._look_for_other_calls)
                    look_at = math.inf
        finally:
            self.over.set()
            if set(self.executors) - outcomes.keys():
                atexit.register(self._wake, threads)
        return outcomes, problems

    def _ask(self, executor: int, mine: Outcome) -> None:
        """Tell `executor` which call this rank is in, and wait for its outcome.

        If it is this rank, answer the others.
        """
        if executor == self.me:
            self._answer_all(mine)
            return
        outcome: Any = None  # until it is here
        problems: dict[int, str] = {}
        with self._loss_noted(executor, problems):
            self._send(executor, self.tag, self.text.encode())
            head, value = self._receive(executor, self.tag + 1)
            outcome = pickle.loads(head)._replace(value=value)
            problems |= outcome.problems | self._compare(executor, outcome.call)
        self.answers.put((executor, outcome, problems))

    def _answer_all(self, mine: Outcome) -> None:
        """Receive from every other rank which call it is in, then send each of them the outcome."""
        peers = [rank for rank in self.members if rank != self.me]
        problems: dict[int, str] = {}
        for peer in peers:
            self.awaited = peer
            with self._loss_noted(peer, problems):
                problems |= self._compare(peer, self._receive(peer, self.tag)[0].decode())
        head = pickle.dumps(mine._replace(problems=problems, value=b""))
        for peer in peers:
            with self._loss_noted(peer, problems):
                self._send(peer, self.tag + 1, head, mine.value)
        self.answers.put((self.me, mine, problems))

    def _look_for_other_calls(self) -> None:
        """Compare calls through the store until the wait is over.

        Ranks that wait for different executing ranks never exchange a message. So after some
        seconds each rank adds its call to lists in the store, and reads what the others added. A
        call that is already in a list is not added again, so the lists stay short.
        """
        store, own = self.opened.store, f"{self.me}\t{self.text}\n"
        with suppress(Exception):  # not every store can append, and its host may be gone
            for key in self.keys:
                if f"\t{self.text}\n" not in store.compare_set(key, "", own).decode():
                    store.append(key, own)
            while not self.over.wait(LOOK_EVERY):
                for line in b"".join(map(store.get, self.keys)).decode().splitlines():
                    rank, _, text = line.partition("\t")
                    # Not under the rank's own key: this rank then waits for GRACE before it
                    # raises, so that the others can read the list before it leaves.
                    self.answers.put((rank, None, self._compare(~int(rank), text)))

    def _send(self, peer: int, tag: int, head: bytes, value: Any = b"") -> None:
        """Send `head` and `value` in one frame, or after a frame that holds only their sizes."""
        frame, parts = SIZES.pack(len(head), len(value)), [bytearray(head), value]
        if len(head) + len(value) <= ROOM:
            frame, parts = frame + head + bytes(value), []
        for part in [bytearray(frame.ljust(FRAME, b"\0")), *parts]:
            if len(part):
                self.opened.side.send([_tensor(part)], peer, tag).wait(FOREVER)

    def _receive(self, peer: int, tag: int) -> tuple[bytearray, bytearray]:
        """Wait for what `peer` sends with `tag`; return the head and the value."""

        def receive(size: int) -> bytearray:
            part = bytearray(size)
            if part:
                self.opened.side.recv([_tensor(part)], peer, tag).wait(FOREVER)
            return part

        frame = receive(FRAME)
        head_size, value_size = SIZES.unpack_from(frame)
        if head_size + value_size > ROOM:
            return receive(head_size), receive(value_size)
        return frame[SIZES.size :][:head_size], frame[SIZES.size + head_size :][:value_size]

    def _wake(self, threads: Sequence[Thread]) -> None:
        """At exit, end the threads of a wait that was given up.

        A thread that returns from C++ after Python has gone aborts the process (up to Python
        3.13). A receive that times out closes all connections of its group, which wakes them now.
        """
        waiting = [thread for thread in threads if thread.is_alive()]
        for peer in set(self.members) - {self.me} if waiting else ():
            with suppress(RuntimeError):
                work = self.opened.side.recv([_tensor(bytearray(1))], peer, WAKING_TAG)
                work.wait(timedelta(milliseconds=1))
        for thread in waiting:
            thread.join(1)

    @contextmanager
    def _loss_noted(self, rank: int, problems: dict[int, str]) -> Iterator[None]:
        """Add `rank` to `problems` if the block fails; the main thread raises what is in there."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - gloo's errors, but also out of memory, say
            text = f"died or left before the end of {self.text}, or its outcome was lost"
            problems.setdefault(rank, f"rank {rank} {text}: see its output ({error!r})")

    def _compare(self, rank: int, text: str) -> dict[int, str]:
        """Return the problem if a rank is in the call `text`, and this rank in another one.

        For a rank that is known from the store alone, `rank` and the key of the problem are ~rank.
        """
        advice = "every rank must make the same on_rank and rank_first calls in the same order"
        problem = f"rank {max(rank, ~rank)} is in {text}, rank {self.me} in {self.text}: {advice}"
        return {} if text == self.text else {rank: problem}


def _tensor(buffer: Any) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def pack_exception(
    error: BaseException, dumps: Sequence[Callable[[Any], bytes]] = (pickle.dumps,)
) -> bytes:
    """Return `error` and its traceback as bytes, even if `error` itself cannot be pickled.

    Args:
        error: The exception. If its type does not survive pickling, only its text travels.
        dumps: Functions that pickle it, tried in order. `pickle.dumps` pickles the class by
            reference, so the receiver gets its own class and its `except` catches it.
    """
    with_name, trace = describe(error, traceback.format_exception_only), describe(error)
    for dump in dumps:
        with suppress(Exception):  # __reduce__ and __init__ are the user's: anything may happen
            copy = dump(error)
            if type(pickle.loads(copy)) is type(error):
                return pickle.dumps((copy, with_name, trace))
    return pickle.dumps((None, with_name, trace))


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


def describe(error: BaseException, lines: Callable[..., Any] = traceback.format_exception) -> str:
    """Return `error` as Python prints it; only its type's name if Python cannot print it."""
    with suppress(Exception):  # the text and the notes are the user's code, too
        return "".join(lines(error)).strip()
    return type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Add `note` to `error`; on Python 3.10, show it as the exception's cause."""
    with suppress(Exception):  # an exception may refuse new attributes
        error.__dict__.setdefault("__notes__", []).append(note)  # Python 3.11 and later print it
        if not hasattr(error, "add_note"):
            cause = RemoteTraceback(note)
            cause.__cause__, error.__cause__ = error.__cause__, cause


def _raise_first(errors: list[BaseException]) -> None:
    first, *others = errors
    for other in others:
        add_note(first, f"also {describe(other)}")
    try:
        raise first
    finally:
        del first, others, errors  # otherwise frame, exception and traceback form a cycle
