"""When an update of Q is due, and how long it is."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from psgd.probes.schedule import YOUNG, is_due, rate_of_Q


def schedule(every: int, anneal: int, steps: int) -> list[int]:
    return [t for t in range(steps) if is_due({"update_every": every, "update_anneal": anneal}, t)]


@pytest.mark.parametrize("every", [1, 2, 3, 10, 97])
def test_without_annealing_every_kth_step_is_due(every: int):
    assert schedule(every, 0, 500) == [t for t in range(500) if t % every == 0]


@pytest.mark.parametrize("anneal", [0, 1, 50, 10_000])
def test_every_step_stays_every_step(anneal: int):
    assert schedule(1, anneal, 200) == list(range(200))


ANNEALED = [(2, 1), (2, 100), (3, 7), (10, 5), (10, 1000), (7, 333), (100, 2000)]
annealed = pytest.mark.parametrize(("every", "anneal"), ANNEALED)


@annealed
def test_the_first_step_is_always_due(every: int, anneal: int):
    assert schedule(every, anneal, 1) == [0]


@pytest.mark.parametrize(("every", "anneal"), [(2, 100), (10, 1000), (7, 333), (100, 2000)])
def test_at_first_every_step_is_due(every: int, anneal: int):
    """For as long as the rate has fallen by less than one update."""
    first = int((2 * anneal / math.log(every)) ** 0.5) - 1
    assert first >= 4
    assert schedule(every, anneal, first) == list(range(first))


@annealed
def test_in_the_end_every_kth_step_is_due(every: int, anneal: int):
    due = [t for t in schedule(every, anneal, anneal + 50 * every) if t >= anneal + every]
    assert len(due) >= 40
    assert {b - a for a, b in pairwise(due)} == {every}


@annealed
def test_updates_become_rarer_and_never_rarer_than_every_kth(every: int, anneal: int):
    """The gaps grow, but for the rounding to whole steps."""
    due = schedule(every, anneal, anneal + 20 * every)
    gaps = [b - a for a, b in pairwise(due)]
    assert max(gaps) <= every + 1
    longest = 0
    for gap in gaps:
        assert gap >= longest - 1
        longest = max(longest, gap)
    quarters = [sum(1 for t in due if i * anneal <= 4 * t < (i + 1) * anneal) for i in range(4)]
    assert quarters == sorted(quarters, reverse=True)


@annealed
def test_the_number_of_updates_is_the_integral_of_their_rate(every: int, anneal: int):
    """Of ``every ** (−t / anneal)``."""
    expected = anneal / math.log(every) * (1 - 1 / every)
    assert abs(len(schedule(every, anneal, anneal)) - expected) <= 1.5


def test_annealing_updates_more_often_than_no_annealing_and_less_than_at_every_step():
    for t in range(10, 500, 7):
        assert len(schedule(10, 0, t)) < len(schedule(10, 200, t)) <= t
        assert len(schedule(10, 100, t)) <= len(schedule(10, 200, t))


def rates(lr: float, boost: float, every: int, anneal: int = 0) -> list[float]:
    options = {"precond_lr": lr, "precond_boost": boost, "update_every": every, "update_anneal": anneal}
    return [rate_of_Q(options, t) for t in range(1000 * every) if is_due(options, t)]


@pytest.mark.parametrize(("every", "anneal"), [(1, 0), (3, 0), (4, 200)])
def test_steps_of_a_young_q_are_longer(every: int, anneal: int):
    each = rates(0.1, 3.0, every, anneal)
    assert sorted(set(each), reverse=True) == pytest.approx([0.3, 0.3 / 2**0.5, 0.15, 0.15 / 2**0.5, 0.1])
    assert each == sorted(each, reverse=True)
    assert abs(each.index(0.15) - 2 * YOUNG) <= 1
    assert abs(each.index(0.1) - 4 * YOUNG) <= 1


def test_without_a_boost_the_rate_is_what_it_is():
    assert set(rates(0.123, 1.0, 1)) == {0.123}


def test_a_boost_stays_below_one():
    assert max(rates(0.5, 3.0, 1)) == 0.9
    assert set(rates(0.95, 3.0, 1)) == {0.95}
