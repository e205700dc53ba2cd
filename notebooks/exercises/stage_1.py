"""Stage 1 of myddp.py: the two halves of a ring all-reduce, on simulated ranks, then on gloo."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, myddp
from lesson.cost_model import Link, all_reduce_seconds, bytes_sent, gradient_bytes
from lesson.partners import open_impatient_group
from lesson.record import recorded
from lesson.trial import WEIGHTS, Batch, Prediction, Way, new_gpt, vector
from torch import Tensor

RANKS, LENGTH = 4, 10  # the chunks have 3, 3, 2 and 2 numbers
PATIENCE = 2.0  # seconds that a simulated rank waits


class SimulatedRing:
    """A rank of a ring whose ranks are threads. It notes the bytes that it sends."""

    def __init__(self, rank: int, links: list["queue.SimpleQueue[Tensor]"]) -> None:
        self.rank, self.world_size, self._links = rank, len(links), links
        self.sent: list[int] = []

    def send(self, tensor: Tensor) -> None:
        self.sent.append(tensor.numel())
        self._links[self.rank].put(tensor.clone())

    def receive(self, like: Tensor) -> Tensor:
        received = self._links[self.rank - 1].get(timeout=PATIENCE)
        if received.shape != like.shape:
            raise ValueError(
                f"rank {self.rank} received a chunk of {received.numel()} numbers, but it expected "
                f"{like.numel()}: receive the chunk that the rank before you sends in this step"
            )
        return received


class Ranks(NamedTuple):
    """By rank: the vector before and after, and how many numbers each message had."""

    before: Tensor
    after: Tensor
    sent: list[list[int]]


def _simulate(function: Callable[..., Any], before: Tensor) -> Ranks:
    """Call the function on every rank, with the chunks of its vector."""
    links: list[queue.SimpleQueue[Tensor]] = [queue.SimpleQueue() for _ in before]
    rings = [SimulatedRing(rank, links) for rank in range(len(before))]
    after = before.clone()
    with ThreadPoolExecutor(len(before)) as pool:
        calls = [
            pool.submit(function, ring, [*after[ring.rank].tensor_split(len(before))])
            for ring in rings
        ]
    try:
        for call in calls:
            call.result()
    except queue.Empty:
        raise RuntimeError(
            "a rank waited for a message that nobody had sent. In each step, every rank sends one "
            "chunk and then receives one, and there are world_size - 1 steps"
        ) from None
    return Ranks(before, after, [ring.sent for ring in rings])


def _vectors() -> Tensor:
    """Return a vector for each rank, whose sums tell who has contributed: (RANKS, LENGTH)."""
    return 10.0 ** torch.arange(RANKS)[:, None] * torch.arange(1, LENGTH + 1)


def _chunk(vectors: Tensor, rank: int, chunk: int) -> Tensor:
    return vectors[rank].tensor_split(len(vectors))[chunk]


def _reduce_scatter(function: Callable[..., Any]) -> Ranks:
    return _simulate(function, _vectors())


def _judge_reduce_scatter(seen: list[Ranks]) -> str | None:
    before, after, sent = seen[0]
    total = before.sum(0).expand_as(before)
    own = [torch.equal(_chunk(after, r, r), _chunk(total, r, r)) for r in range(RANKS)]
    if torch.equal(before, after):
        return "no chunk has changed. Add what you receive to the chunk in place, with +="
    if any(count != RANKS - 1 for count in map(len, sent)):
        return (
            f"rank 0 has sent {len(sent[0])} messages, but a chunk has all sums after "
            f"{RANKS - 1}: world_size - 1 steps"
        )
    if max(map(max, sent)) > 3:
        return "you send the whole tensor. Send one chunk in each step, or the ring saves nothing"
    if all(own):
        return None
    shifted = [
        c
        for c in range(1, RANKS)
        if all(
            torch.equal(_chunk(after, r, (r + c) % RANKS), _chunk(total, r, (r + c) % RANKS))
            for r in range(RANKS)
        )
    ]
    if shifted:
        return (
            f"rank 0 ends with the whole sum of chunk {shifted[0]}, but it should be chunk 0: "
            "every rank has to end with its own. Begin with another chunk"
        )
    if torch.equal(_chunk(after, 0, 0), _chunk(total, 0, 0) / RANKS):
        return "you return the mean. An all-reduce adds, and DDP divides later"
    if any(torch.equal(_chunk(after, 0, 0), _chunk(before, r, 0)) for r in range(RANKS)):
        return "a chunk replaced another one. In this half, add what you receive"
    return (
        f"rank 0's chunk 0 begins with {_chunk(after, 0, 0)[0]:g}, but the sum is "
        f"{_chunk(total, 0, 0)[0]:g}. Each digit of it is a rank: in each step, pass on the chunk "
        "that you have just added to"
    )


class Gathered(NamedTuple):
    """What the function did on simulated ranks, and both functions on gloo."""

    simulated: Ranks
    exact: bool  # the same as dist.all_reduce
    sent: int  # bytes


def _all_gather(function: Callable[..., Any]) -> Gathered:
    """On simulated ranks: as if reduce_scatter were done, and chunk r of rank r complete."""
    simulated = _simulate(function, _vectors())
    open_impatient_group()
    vector = torch.arange(LENGTH, dtype=torch.float64) * 10 ** dist.get_rank()
    dist.all_reduce(wanted := vector.clone())
    exact = sent = 0
    if _judge_gathered(simulated) is None:
        with recorded() as log:
            ring_all_reduce(myddp.load(all_gather=function), vector)
        sent = sum(call.size for call in log.calls if call.name == "isend")
        exact = torch.equal(vector, wanted)
    dist.barrier()  # nobody leaves while a message is on its way
    dist.destroy_process_group()
    return Gathered(simulated, bool(exact), sent)


def _judge_all_gather(seen: list[Gathered]) -> str | None:
    if hint := _judge_gathered(seen[0].simulated):
        return hint
    if not all(each.exact for each in seen):
        return (
            "it is right on four simulated ranks, but not on three real ones: use ring.world_size"
        )
    return None


def _judge_gathered(ranks: Ranks) -> str | None:
    before, after, sent = ranks
    wanted = torch.cat([_chunk(before, r, r) for r in range(RANKS)]).expand_as(before)
    if torch.equal(before, after):
        return "no chunk has changed. Copy what you receive into the chunk, with copy_"
    if max(map(max, sent)) > 3:
        return "you send the whole tensor in each step. Send one chunk"
    if torch.equal(after, wanted):
        return None
    if any(count != RANKS - 1 for count in map(len, sent)):
        return f"rank 0 has sent {len(sent[0])} messages. All have arrived after {RANKS - 1}"
    if after.sum() > wanted.sum():
        return "you add what you receive. These chunks are complete: copy them"
    if not torch.equal(_chunk(after, 0, 0), _chunk(before, 0, 0)):
        return "rank 0 has lost its own chunk. Begin with the chunk that has your own rank's number"
    return "rank 0 holds chunks that are not complete. Pass on the chunk that has just arrived"


def ring_all_reduce(own: Any, tensor: Tensor) -> None:
    """All-reduce a vector with the reader's two functions."""
    ring = own.Ring()
    chunks = [*tensor.tensor_split(ring.world_size)]
    own.reduce_scatter(ring, chunks)
    own.all_gather(ring, chunks)


def way(own: Any) -> Way:
    """All-reduce as many numbers as the small GPT has weights."""
    numbers = vector(new_gpt())
    return Way(lambda _: ring_all_reduce(own, numbers), lambda: numbers)


def torchs_way() -> Way:
    numbers = vector(new_gpt())

    def step(_: Batch) -> None:
        dist.all_reduce(numbers)

    return Way(step, lambda: numbers)


def predict(_forward: float, _backward: float, link: Link) -> Prediction:
    payload = gradient_bytes(WEIGHTS)
    seconds = all_reduce_seconds(payload, 2, link.bandwidth, link.latency)
    return Prediction(0.0, seconds, bytes_sent(payload, 2))


EXERCISES = {
    "reduce_scatter": Exercise(_reduce_scatter, _judge_reduce_scatter, nproc=0),
    "all_gather": Exercise(_all_gather, _judge_all_gather, nproc=3),
}
