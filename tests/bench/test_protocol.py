"""Every optimizer has the same number of learning rates over the same factor; winners are inside of what was tried."""

from __future__ import annotations

import math

import pytest

from psgd.bench import protocol
from psgd.bench.protocol import Search, Setting, spread


def tried(default: float, best: float) -> tuple[list[float], float]:
    """Learning rates of a search whose score is the distance from the best one, and its result."""
    search, rates = Search(default), []
    for setting in search:
        rates.append(setting.lr)
        search.tell(abs(math.log(setting.lr / best)))
    return rates, search.best.lr


@pytest.mark.parametrize("default", [1e-3, 0.02, 0.5])
def test_seven_learning_rates_over_a_factor_of_a_thousand_around_the_default(default):
    rates, best = tried(default, default)
    assert rates[0] == best == default
    assert len(set(rates)) == 7
    assert max(rates) / min(rates) == pytest.approx(1000, rel=0.01)
    assert math.sqrt(max(rates) * min(rates)) == pytest.approx(default, rel=0.01)


@pytest.mark.parametrize("factor", [10**-2.5, 10**-1.5, 10**1.5, 100])
def test_the_range_is_extended_until_the_best_is_inside(factor):
    rates, best = tried(1e-3, 1e-3 * factor)
    assert best == pytest.approx(1e-3 * factor, rel=0.01)
    assert min(rates) < best < max(rates)


def test_it_is_not_extended_for_ever():
    rates, best = tried(1e-3, 1e9)
    assert len(rates) == 7 + protocol.FURTHER
    assert best == max(rates)


def test_of_equal_ones_that_closest_to_the_default_is_taken():
    search = Search(1e-3)
    for _ in search:
        search.tell(math.inf)
    assert search.best == Setting(1e-3)
    assert len(search.scores) == 7


def test_seeds_of_results_are_others_than_those_of_tuning():
    assert protocol.TUNING_SEED not in protocol.TEST_SEEDS
    assert len(protocol.TEST_SEEDS) >= 3
    assert str(protocol.TUNING_SEED) in protocol.TEXT


def test_all_runs_of_an_optimizer():
    """Runs that tune know the lowest score so far, those that are judged do not; the default has rows of its own."""
    told, roles = [], []

    def train(setting, seed, role, best):
        told.append((seed, best))
        roles.append(role)
        yield {"lr": setting.lr, "seed": seed, "step": 1}
        yield {"lr": setting.lr, "seed": seed, "step": 2}

    def score(rows):
        return abs(math.log(rows[-1]["lr"] / 1e-2))

    rows = list(protocol.runs(Search(1e-3), (7, 8), train, score))
    assert roles == [row["role"] for row in rows[::2]]
    assert [(row["seed"], row["step"]) for row in rows[:2]] == [(100, 1), (100, 2)]
    assert {row["seed"] for row in rows if row["role"] == protocol.TUNING} == {100}
    judged = [(row["role"], row["lr"], row["seed"]) for row in rows if row["role"] != protocol.TUNING][::2]
    assert judged == [("tuned", 0.01, 7), ("tuned", 0.01, 8), ("default", 0.001, 7), ("default", 0.001, 8)]
    tuning, last = told[:-4], told[-4:]
    assert tuning[0] == (100, None)
    assert [best for _, best in tuning[1:]] == sorted((best for _, best in tuning[1:]), reverse=True)
    assert [best for _, best in last] == [None] * 4


def test_the_default_may_have_other_seeds():
    def train(setting, seed, role, best):
        yield {"lr": setting.lr, "decay": setting.weight_decay, "seed": seed}

    search = Search(1e-3, 1, (0.1, 1.0))
    rows = list(protocol.runs(search, (7, 8), train, lambda rows: 0.0, default_seeds=(7,)))
    judged = [(row["role"], row["decay"], row["seed"]) for row in rows if row["role"] != protocol.TUNING]
    assert judged == [("tuned", 0.1, 7), ("tuned", 0.1, 8), ("default", None, 7)]


@pytest.mark.parametrize("best", [(1e-3, 0.1), (1e-3, 1.0), (1e-2, 1.0), (1e-4, 0.1)])
def test_each_learning_rate_is_tried_with_each_weight_decay(best):
    search, tried = Search(1e-3, 3, (0.1, 1.0)), []
    for setting in search:
        tried.append(setting)
        search.tell(abs(math.log(setting.lr / best[0])) + abs(math.log(setting.weight_decay / best[1])))
    assert search.best == pytest.approx(best)
    rates = (1e-3, 3.16e-4, 3.16e-3)
    assert tried[:6] == [Setting(lr, decay) for lr in rates for decay in (0.1, 1.0)]
    assert {setting.weight_decay for setting in tried[6:]} <= {best[1]}  # only there the best may be at an end
    along = [setting.lr for setting in tried if setting.weight_decay == best[1]]
    assert min(along) < best[0] < max(along)


def test_spread():
    assert spread([2.0]) == "2"
    assert spread([1234.0, 2.0, 3.0]) == "3 (2–1,234)"
    assert spread([999.7]) == "1,000"
