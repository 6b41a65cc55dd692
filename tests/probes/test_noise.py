"""Noise is a pure function of seed, step and position."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from psgd.probes.noise import Noise, mix


def test_noise_depends_on_seed_step_and_position_and_nothing_else():
    like = torch.empty(1000, dtype=torch.float64)
    first = Noise(3)(like, 1, 2)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(Noise(3)(like, 1, 2), first)
    assert torch.equal(torch.get_rng_state(), state)
    one_more = [Noise(4)(like, 1, 2), Noise(3)(like, 2, 2), Noise(3)(like, 1, 3)]
    same_sums = [Noise(2)(like, 2, 2), Noise(4)(like, 1, 1), Noise(3)(like, 2, 1), Noise(2)(like, 1, 3)]
    for other in one_more + same_sums:
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.15
    assert abs(first.mean()) < 0.1
    assert abs(first.std() - 1) < 0.1


@given(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3))
def test_different_words_give_different_seeds(a, b):
    assert (mix(*a) == mix(*b)) == (a == b)
    assert 0 <= mix(*a) < 2**63


def test_neighbours_differ_in_their_low_bits_too():
    """Some generators look at 32 bits only."""
    low = {mix(seed, step, i) & 0xFFFFFFFF for seed in range(5) for step in range(100) for i in range(20)}
    assert len(low) >= 9990
