"""The cost model of the planner page: its formulas against simulations and worked examples."""

import pytest
import torch
from lesson.cost_model import (
    PRECISIONS,
    STRATEGIES,
    Link,
    all_reduce_seconds,
    break_even_bandwidth,
    bucket_count,
    bucket_span,
    bucketed_all_reduce_seconds,
    bytes_per_parameter,
    bytes_per_second,
    bytes_sent,
    exposed_seconds,
    fit_link,
    gradient_bytes,
    predict_step,
    ring_bandwidth,
    ring_steps,
    strategy_bytes_sent,
)
from lesson.ring import SimulatedRanks, ring_all_reduce


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_the_ring_sends_what_the_formula_says(world_size):
    ranks = SimulatedRanks(torch.ones(world_size, 16 * world_size))
    ring_all_reduce(ranks)
    payload = ranks.vectors[0].nbytes
    assert ranks.bytes_sent() == [bytes_sent(payload, world_size)] * world_size
    assert ranks.steps == ring_steps(world_size)


def simulate(all_reduce, backward, buckets):
    """Send the buckets one by one. Return when each is ready, and when it is sent from and to."""
    free_at, times = 0.0, []  # free_at: when the network is free again
    for number in range(1, buckets + 1):
        ready = backward * number / buckets
        start = max(free_at, ready)
        free_at = start + all_reduce / buckets
        times.append((ready, start, free_at))
    return times


@pytest.mark.parametrize("buckets", [1, 2, 6, 25])
@pytest.mark.parametrize("all_reduce", [0.1, 0.99, 1.0, 1.5, 7.0])
def test_bucket_span_and_exposed_seconds_are_what_a_simulation_gives(all_reduce, buckets):
    spans = simulate(all_reduce, 1.0, buckets)
    for number, span in enumerate(spans, 1):
        assert bucket_span(number, all_reduce, 1.0, buckets) == pytest.approx(span)
    assert exposed_seconds(all_reduce, 1.0, buckets) == pytest.approx(spans[-1][2] - 1.0)


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_fit_recovers_the_link_that_produced_the_times(world_size):
    link = Link(latency=2e-4, bandwidth=3e9)
    sizes = [2.0**k for k in range(10, 28, 3)]
    measured = {s: all_reduce_seconds(s, world_size, link.bandwidth, link.latency) for s in sizes}
    fitted = fit_link(measured, world_size)
    assert fitted.latency == pytest.approx(link.latency)
    assert fitted.bandwidth == pytest.approx(link.bandwidth)


def test_a_fitted_latency_is_never_negative():
    """Large all-reduces that miss the caches bend the line upwards."""
    fitted = fit_link({1e6: 1e-4, 1e8: 1.0}, world_size=2)
    assert fitted.latency == 0
    assert fitted.bandwidth > 0


def test_a_ring_is_as_fast_as_its_slowest_link():
    assert ring_bandwidth(8, 1, within=450, between=3) == 450  # one node: no network
    assert ring_bandwidth(1, 8, within=2, between=3) == 3  # one GPU per node: no link within a node
    assert ring_bandwidth(8, 4, within=450, between=3) == 3
    assert ring_bandwidth(8, 4, within=2, between=3) == 2


def test_each_bucket_pays_the_latency():
    assert [bucket_count(n, 25) for n in (0, 1, 25, 26, 50, 51)] == [1, 1, 1, 2, 2, 3]
    one = bucketed_all_reduce_seconds(1e6, 1, 4, bandwidth=1e9, latency=0.25)
    assert one == all_reduce_seconds(1e6, 4, bandwidth=1e9, latency=0.25)
    six = bucketed_all_reduce_seconds(1e6, 6, 4, bandwidth=1e9, latency=0.25)
    assert six == pytest.approx(one + 5 * 0.25)


def test_a_step_of_the_worked_example():
    """100 million fp32 parameters in 16 buckets on 8 ranks at 25 gigabits per second.

    Backward hides 15 of its 16 milliseconds.
    """
    payload, bandwidth = gradient_bytes(100e6), bytes_per_second(25)
    step = predict_step(0.008, 0.016, payload, 25e6, 8, bandwidth)
    assert step.buckets == 16
    assert step.all_reduce == pytest.approx(0.224)
    assert step.exposed == pytest.approx(0.224 - 0.015)
    assert step.seconds == pytest.approx(0.008 + 0.016 + 0.209)
    assert step.efficiency == pytest.approx(0.024 / 0.233)
    assert break_even_bandwidth(payload, 8, 0.224) == pytest.approx(bandwidth)


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_memory_is_what_chapter_10_measures(ranks):
    """In fp32 with Adam: 20, 16, 8 + 8 / n, 4 + 12 / n and 16 / n bytes per parameter."""
    sums = [sum(bytes_per_parameter(name, ranks).values()) for name in STRATEGIES]
    assert sums == pytest.approx([20, 16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks])
    sgd = bytes_per_parameter("ZeRO-2", ranks, number=2, state=0)
    assert sgd == {"weights": 2, "gradients": 2 / ranks, "buckets": 0, "optimizer": 0}


def test_traffic_is_what_chapter_10_counts():
    """In units of (n - 1) / n of the model's bytes."""
    unit = 3 / 4 * 4 * 100

    def units(precision):
        sent = [strategy_bytes_sent(name, 100, 4, PRECISIONS[precision]) for name in STRATEGIES]
        return [n / unit for n in sent]

    assert units("fp32") == [2, 2, 3, 2, 3]
    assert units("bf16 autocast") == [2, 2, 3, 2, 2]
    assert units("bf16 autocast, reduce in bf16") == [1, 1, 2, 1.5, 1.5]
    assert units("all bf16") == [1, 1, 1.5, 1, 1.5]
    assert strategy_bytes_sent("DDP", 100, 4, PRECISIONS["fp32"]) == bytes_sent(400, 4)
