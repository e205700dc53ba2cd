"""The cost model in Python; test_planner.py compares it with the formulas of the planner page."""

import pytest
import torch
from lesson.cost_model import (
    Link,
    all_reduce_seconds,
    bucket_span,
    bytes_sent,
    exposed_seconds,
    fit_link,
    ring_steps,
)
from lesson.ring import SimulatedRanks, ring_all_reduce


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_the_ring_sends_what_the_formula_says(world_size):
    ranks = SimulatedRanks(torch.ones(world_size, 16 * world_size))
    ring_all_reduce(ranks)
    sent = [sum(m.size for m in ranks.log if m.source == rank) for rank in range(world_size)]
    assert sent == [bytes_sent(ranks.vectors[0].nbytes, world_size)] * world_size
    assert ranks.steps == ring_steps(world_size)


@pytest.mark.parametrize("all_reduce", [0.1, 1.0, 7.0])
def test_bucket_span_and_exposed_seconds_are_what_a_simulation_gives(all_reduce):
    """The simulation sends 6 buckets one by one, during a backward of 1 s."""
    free_at = 0.0  # when the network is free again
    for number in range(1, 7):
        ready = number / 6
        start = max(free_at, ready)
        free_at = start + all_reduce / 6
        span = bucket_span(number, all_reduce, 1.0, buckets=6)
        assert span == pytest.approx((ready, start, free_at))
    assert exposed_seconds(all_reduce, 1.0, buckets=6) == pytest.approx(free_at - 1.0)


def test_a_fit_recovers_the_link_that_produced_the_times():
    """Large all-reduces that miss the caches bend the line: the latency is never negative."""
    link = Link(latency=2e-4, bandwidth=3e9)
    sizes = [2.0**k for k in range(10, 28, 3)]
    measured = {s: all_reduce_seconds(s, 8, link.bandwidth, link.latency) for s in sizes}
    assert fit_link(measured, 8) == pytest.approx(link)
    fitted = fit_link({1e6: 1e-4, 1e8: 1.0}, world_size=2)
    assert fitted.latency == 0 and fitted.bandwidth > 0
