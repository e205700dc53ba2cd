"""Stage 1 of myddp.py: the two halves of a ring all-reduce, on simulated ranks, then on gloo."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, trial
from lesson.cost_model import Link, all_reduce_seconds, bytes_sent, gradient_bytes
from torch import Tensor

LENGTH = 10  # on 4 ranks, the chunks have 3, 3, 2 and 2 numbers
PATIENCE = 2.0  # seconds that a simulated rank waits


class SimulatedRing:
    """A rank of a ring whose ranks are threads. It notes how many numbers each message has."""

    def __init__(self, rank: int, links: list["queue.SimpleQueue[Tensor]"]) -> None:
        self.rank, self.world_size, self._links = rank, len(links), links
        self.sent: list[int] = []

    def send(self, tensor: Tensor) -> None:
        if len(self.sent) == 10 * self.world_size:
            raise RuntimeError(f"rank {self.rank} sends without end: does your loop stop?")
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


def _observe(function: Callable[..., Any]) -> list[Ranks]:
    return [_simulate(function, 4), _simulate(function, 3)]


def _simulate(function: Callable[..., Any], n: int) -> Ranks:
    """Call the function on n ranks. The digits of the vectors' sums tell who has contributed."""
    before = 10.0 ** torch.arange(n)[:, None] * torch.arange(1, LENGTH + 1)
    links: list[queue.SimpleQueue[Tensor]] = [queue.SimpleQueue() for _ in range(n)]
    rings, after = [SimulatedRing(rank, links) for rank in range(n)], before.clone()
    with ThreadPoolExecutor(n) as pool:
        chunks = [[*own.tensor_split(n)] for own in after]
        calls = [pool.submit(function, *each) for each in zip(rings, chunks, strict=True)]
    errors = [error for call in calls if (error := call.exception())]
    for error in errors:
        if not isinstance(error, queue.Empty):  # it explains why the others wait
            raise error
    if errors:
        raise RuntimeError(
            f"with {n} ranks, a rank waited for a message that nobody had sent. In each of the "
            "world_size - 1 steps, every rank sends one chunk and then receives one"
        ) from None
    return Ranks(before, after, [ring.sent for ring in rings])


def _judge_messages(before: Tensor, after: Tensor, sent: list[list[int]]) -> str | None:
    steps = len(before) - 1
    if torch.equal(before, after):
        return "no chunk has changed. Change it in place: add with +=, or copy with copy_"
    if any(len(own) != steps for own in sent):
        return f"rank 0 of {steps + 1} has sent {len(sent[0])} messages, but all is done in {steps}"
    if max(map(max, sent)) > LENGTH / steps:
        return "you send the whole tensor. Send one chunk in each step, or the ring saves nothing"
    return None


def _judge_reduce_scatter(seen: list[list[Ranks]]) -> str | None:
    for before, after, sent in seen[0]:
        n = len(before)
        total, ends = before.sum(0).tensor_split(n), [own.tensor_split(n) for own in after]
        if hint := _judge_messages(before, after, sent):
            return hint
        if all(torch.equal(ends[rank][rank], total[rank]) for rank in range(n)):
            continue
        if any(map(torch.equal, ends[0][1:], total[1:])):
            return (
                "rank 0 ends with the whole sum of another chunk, but it should be chunk 0: every "
                "rank has to end with its own. Begin with another chunk"
            )
        if any(torch.equal(ends[0][0], own.tensor_split(n)[0]) for own in before):
            return "a chunk replaced another one. In this half, add what you receive"
        return (
            f"rank 0's chunk 0 begins with {ends[0][0][0]:g}, but the sum is {total[0][0]:g}. Each "
            "digit of it is a rank: in each step, pass on the chunk that you have just added to"
        )
    return None


def _judge_all_gather(seen: list[list[Ranks]]) -> str | None:
    """Judge as if reduce_scatter were done, and chunk r of rank r complete."""
    for before, after, sent in seen[0]:
        n = len(before)
        wanted = torch.cat([own.tensor_split(n)[rank] for rank, own in enumerate(before)])
        if hint := _judge_messages(before, after, sent):
            return hint
        if all(torch.equal(own, wanted) for own in after):
            continue
        if after.sum() > n * wanted.sum():
            return "you add what you receive. These chunks are complete: copy them"
        if after[0, 0] != wanted[0]:
            return "rank 0 has lost its own chunk. Begin with the chunk of your own rank's number"
        return "rank 0 holds chunks that are not complete. Pass on the chunk that has just arrived"
    return None


def way(own: Any) -> trial.Way:
    """All-reduce as many numbers as the small GPT has weights."""
    numbers, ring = trial.vector(trial.new_gpt()), own.Ring()

    def step(_: Any) -> None:
        chunks = [*numbers.tensor_split(ring.world_size)]
        own.reduce_scatter(ring, chunks)
        own.all_gather(ring, chunks)

    return trial.Way(step, lambda: numbers)


def torchs_way() -> trial.Way:
    numbers = trial.vector(trial.new_gpt())
    return trial.Way(lambda _: dist.all_reduce(numbers), lambda: numbers)


def predict(_forward: float, _backward: float, link: Link) -> trial.Prediction:
    payload = gradient_bytes(trial.WEIGHTS)
    seconds = all_reduce_seconds(payload, 2, link.bandwidth, link.latency)
    return trial.Prediction(0.0, seconds, bytes_sent(payload, 2))


JUDGES = {"reduce_scatter": _judge_reduce_scatter, "all_gather": _judge_all_gather}
EXERCISES = {
    name: Exercise(_observe, judge, nproc=0, train=trial.training(name, way, torchs_way))
    for name, judge in JUDGES.items()
}
