"""Speed: the slowest network that still hides the all-reduce."""

import math

from lesson import Exercise

# (parameters, world size, seconds of backward)
CASES = [(100e6, 8, 0.2), (100e6, 2, 0.2), (7e6, 16, 0.01)]
SMALLER_CHUNKS = (
    "The answer grows with the number of ranks. In the ring, more ranks cut the tensor into "
    "smaller chunks, so"
)
# What a slip multiplies the answer by, for n ranks, and its hint.
SLIPS = [
    (
        lambda n: 1 / 2,
        "The answer is half of what is needed. An all-reduce goes round the ring twice: once to "
        "add up (reduce-scatter) and once to hand out the sums (all-gather).",
    ),
    (
        lambda n: 1 / 8,
        "The answer is an eighth of what is needed, which looks like gigabytes per second. "
        "Networks are sold in gigabits per second, and a byte has 8 bits.",
    ),
    (
        lambda n: 1 / 4,
        "The answer is a quarter of what is needed, as if a gradient had one byte. In fp32, each "
        "number takes 4 bytes.",
    ),
    (
        lambda n: n * n / (n - 1),
        f"{SMALLER_CHUNKS} a rank sends (n - 1) / n of it in each phase, not n times it.",
    ),
    (
        lambda n: n,
        f"{SMALLER_CHUNKS} in each of the 2 (n - 1) steps, a rank sends only 1/n of it.",
    ),
    (
        lambda n: n / (n - 1),
        "The answer is a little too high, most of all for 2 ranks. In each phase, a rank sends all "
        "chunks but one, which is (n - 1) / n of the tensor.",
    ),
]


def _ask_for_gigabits(break_even_gigabits):
    return [break_even_gigabits(*case) for case in CASES]


def _judge_gigabits(seen):
    wanted = [8 * 4 * count * 2 * (n - 1) / n / seconds / 1e9 for count, n, seconds in CASES]
    ratios = [answer / want for answer, want in zip(seen[0], wanted, strict=True)]

    def is_off_by(factors):
        return all(map(lambda r, f: math.isclose(r, f, rel_tol=1e-3), ratios, factors))

    if is_off_by([1, 1, 1]):
        return None
    for slip, hint in SLIPS:
        if is_off_by([slip(n) for _, n, _ in CASES]):
            return hint
    return (
        f"For 100 million parameters, 8 ranks and 0.2 s of backward, your function returned "
        f"{seen[0][0]:.4g} Gbit/s, and {wanted[0]:.4g} are needed. First write down the bytes that "
        "a rank sends, then divide by the time."
    )


EXERCISES = {
    "break_even_gigabits": Exercise(_ask_for_gigabits, _judge_gigabits, nproc=0),
}
