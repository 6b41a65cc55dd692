"""Work divided among ranks: evenly, and in one way only."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgd.ranks.assign import FLOPS_PER_BYTE, assign, cost

COSTS = st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1e15)), max_size=40)


def loads(costs, owners, world_size):
    sums = [0.0] * world_size
    for c, owner in zip(costs, owners, strict=True):
        sums[owner] += c
    return sums


@given(COSTS, st.integers(1, 12))
def test_no_rank_has_much_more_than_the_mean(costs, world_size):
    """The busiest rank was the least busy one when it got the last of its work, which is the least of it."""
    owners = assign(costs, world_size)
    assert len(owners) == len(costs)
    assert all(0 <= owner < world_size for owner in owners)
    sums = loads(costs, owners, world_size)
    busiest = max(range(world_size), key=lambda rank: sums[rank])
    last = min((c for c, owner in zip(costs, owners, strict=True) if owner == busiest), default=0)
    assert sums[busiest] <= (sum(costs) / world_size + last * (1 - 1 / world_size)) * (1 + 1e-9)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_the_bound_on_the_best(costs, world_size):
    best = min(
        max(loads(costs, owners, world_size)) for owners in itertools.product(range(world_size), repeat=len(costs))
    )
    found = max(loads(costs, assign(costs, world_size), world_size))
    assert 3 * world_size * found <= (4 * world_size - 1) * best


def test_many_pieces_are_divided_to_a_third_over_the_mean():
    generator = random.Random(0)
    for _ in range(100):
        world_size = generator.randint(1, 64)
        costs = [generator.choice([1.0, 3.5, 11.0, 40.0]) for _ in range(generator.randint(4, 20) * world_size)]
        found = max(loads(costs, assign(costs, world_size), world_size))
        assert found <= max(sum(costs) / world_size * 4 / 3, max(costs))


def test_ties_go_by_position():
    assert assign([1, 1, 1, 1, 1], 3) == [0, 1, 2, 0, 1]
    assert assign([0, 0], 2) == [0, 0]
    assert assign([1, 2, 2], 2) == [0, 0, 1]
    assert assign([], 4) == []


def test_cost_counts_both_products_and_memory():
    assert cost(5.0, 0) == 5.0
    assert cost(0.0, 2) == 2 * FLOPS_PER_BYTE
    assert cost(1e9, 10) == pytest.approx(1e9 + 10 * FLOPS_PER_BYTE)
