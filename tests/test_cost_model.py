"""The cost model in Python; test_planner.py compares it with the formulas of the planner page."""

import pytest
import torch
from lesson.cost_model import bytes_sent, exposed_seconds, ring_steps
from lesson.ring import SimulatedRanks, ring_all_reduce


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_the_ring_sends_what_the_formula_says(world_size):
    ranks = SimulatedRanks(torch.ones(world_size, 16 * world_size))
    ring_all_reduce(ranks)
    sent = [sum(m.size for m in ranks.log if m.source == rank) for rank in range(world_size)]
    assert sent == [bytes_sent(ranks.vectors[0].nbytes, world_size)] * world_size
    assert ranks.steps == ring_steps(world_size)


@pytest.mark.parametrize("all_reduce", [0.1, 1.0, 7.0])
def test_exposed_seconds_are_what_a_simulation_gives(all_reduce):
    """The simulation sends 6 buckets one by one, during a backward of 1 s."""
    free_at = 0.0  # when the network is free again
    for number in range(1, 7):
        free_at = max(free_at, number / 6) + all_reduce / 6
    assert exposed_seconds(all_reduce, 1.0, buckets=6) == pytest.approx(free_at - 1.0)
