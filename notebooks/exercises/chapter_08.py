"""Performance: the slowest network that still hides, and an all-reduce of few steps."""

import math
from collections.abc import Callable
from typing import Any

import torch
from lesson import Exercise
from lesson.cost_model import break_even_bandwidth, gradient_bytes
from lesson.ring import SimulatedRanks, replay

# (parameters, world size, seconds of backward)
CASES = [(100e6, 8, 0.2), (100e6, 2, 0.2), (7e6, 16, 0.01)]
# What a slip multiplies the answer by, and what to think about. The world size is in two of them.
SLIPS: list[tuple[Callable[[int], float], str]] = [
    (
        lambda n: 1 / 2,
        "The answer is half of what is needed. An all-reduce goes round the ring twice: once to "
        "add up (reduce-scatter) and once to hand out the sums (all-gather).",
    ),
    (
        lambda n: 1 / 8,
        "The answer is an eighth of what is needed, which looks like gigabytes a second. Networks "
        "are sold in gigabits a second, and a byte has 8 bits.",
    ),
    (
        lambda n: 1 / 4,
        "The answer is a quarter of what is needed, as if a gradient had one byte. In fp32 each "
        "number takes 4 bytes.",
    ),
    (
        lambda n: n * n / (n - 1),
        "The answer grows with the number of ranks. In the ring, more ranks cut the vector into "
        "smaller chunks, so a rank sends (n - 1) / n of it in each phase, not n or n - 1 times it.",
    ),
    (
        lambda n: n,
        "The answer grows with the number of ranks. In the ring, more ranks cut the vector into "
        "smaller chunks: in each of the 2 (n - 1) steps a rank sends only 1/n of it.",
    ),
    (
        lambda n: n / (n - 1),
        "The answer is a little too high, most of all for 2 ranks. In each phase a rank sends all "
        "chunks but one, which is (n - 1) / n of the vector and not the whole vector.",
    ),
]


def _ask_for_gigabits(break_even_gigabits: Callable[..., Any]) -> list[Any]:
    return [break_even_gigabits(*case) for case in CASES]


def _judge_gigabits(seen: list[list[Any]]) -> str | None:
    (answers,) = seen
    wanted = [
        break_even_bandwidth(gradient_bytes(parameters), ranks, backward) * 8 / 1e9
        for parameters, ranks, backward in CASES
    ]
    ratios = [answer / want for answer, want in zip(answers, wanted, strict=True)]
    if all(math.isclose(ratio, 1, rel_tol=1e-3) for ratio in ratios):
        return None
    for slip, hint in SLIPS:
        slips = [slip(ranks) for _, ranks, _ in CASES]
        if all(math.isclose(r, s, rel_tol=1e-3) for r, s in zip(ratios, slips, strict=True)):
            return hint
    case, answer, want = CASES[0], answers[0], wanted[0]
    return (
        f"For {case[0] / 1e6:.0f} million parameters, {case[1]} ranks and {case[2]} s of backward "
        f"your function returned {answer:.4g} Gbit/s, and {want:.4g} are needed. Write down the "
        "bytes that a rank sends first, then divide by the time."
    )


def _run_doubling(doubling_all_reduce: Callable[[SimulatedRanks], Any]) -> SimulatedRanks:
    """Let the function work on 8 simulated ranks, and return them."""
    generator = torch.Generator().manual_seed(0)
    ranks = SimulatedRanks(torch.randint(0, 100, (8, 16), generator=generator))
    doubling_all_reduce(ranks)
    return ranks


def _judge_doubling(seen: list[SimulatedRanks]) -> str | None:
    (ranks,) = seen
    for step in range(1, ranks.steps + 1):
        pairs = {(sent.source, sent.target) for sent in ranks.log if sent.step == step}
        for rank in range(ranks.world_size):
            if sum(source == rank for source, _ in pairs) > 1:
                return (
                    f"In step {step}, rank {rank} sends to more than one rank. Pair the ranks up: "
                    "each one has one partner in a step."
                )
            if sum(target == rank for _, target in pairs) > 1:
                return (
                    f"In step {step}, rank {rank} receives from more than one rank. Pair the ranks "
                    "up: each one has one partner in a step."
                )
    everyone = list(range(ranks.world_size))
    for rank, row in enumerate(replay(ranks)[-1]):
        for chunk, whose in enumerate(row):
            at = f"rank {rank}'s chunk {chunk}"
            if twice := [other for other in whose if whose.count(other) > 1]:
                return (
                    f"At the end, {at} contains the numbers of rank {twice[0]} more than once. The "
                    "partner of a step must not know anything yet that the rank already has."
                )
            if whose != everyone:
                return (
                    f"At the end, {at} is the sum of ranks {whose} only, after {ranks.steps} "
                    "steps. What arrives must be added, and after each step a rank should know "
                    "twice as many ranks' numbers."
                )
    if ranks.steps > 3:
        return (
            f"The sums are right, but took {ranks.steps} steps, and 8 ranks need only 3. Send "
            "whole vectors instead of chunks, so that what a rank knows doubles in every step."
        )
    return None


EXERCISES = {
    "break_even_gigabits": Exercise(_ask_for_gigabits, _judge_gigabits, nproc=1),
    "doubling_all_reduce": Exercise(_run_doubling, _judge_doubling, nproc=1),
}
