from __future__ import annotations

import pytest

from psgd.experiments.claim import Claim, Verdict
from psgd.experiments.run import Result
from tests.experiments.runs import result, small_first


def results(values: dict[int, dict[str, float]]) -> dict[int, dict[str, Result]]:
    return {
        seed: {label: result(label, seed, loss=[value]) for label, value in by_label.items()}
        for seed, by_label in values.items()
    }


CLAIM = Claim("a_below_b", "a is below b", ("a", "b"), small_first)


@pytest.mark.parametrize(("agreeing", "holds"), [(5, True), (4, True), (3, False), (0, False)])
def test_a_claim_holds_where_four_of_five_seeds_agree(agreeing, holds):
    verdict = CLAIM.judge(results({seed: {"a": 1.0, "b": 2.0 if seed < agreeing else 0.0} for seed in range(5)}))
    assert verdict["holds"] is holds
    assert verdict["measured"].startswith(f"{agreeing} of 5 seeds")
    assert [entry["holds"] for entry in verdict["seeds"]] == [seed < agreeing for seed in range(5)]


def test_one_seed_speaks_for_itself():
    verdict = CLAIM.judge(results({0: {"a": 1.0, "b": 2.0}}))
    assert verdict["holds"] is True
    assert verdict["measured"] == "1.000 < 2.000"


def test_seeds_without_the_runs_do_not_count():
    verdict = CLAIM.judge(results({0: {"a": 1.0, "b": 2.0}, 1: {"a": 1.0}}))
    assert [entry["seed"] for entry in verdict["seeds"]] == [0]
    assert verdict["holds"] is True


@pytest.mark.parametrize("together", [True, False])
def test_a_claim_that_was_not_measured_does_not_hold(together):
    claim = Claim("a", "a", ("a",), lambda *a: Verdict(True, "yes"), together=together)
    verdict = claim.judge(results({0: {"b": 1.0}}))
    assert verdict["holds"] is False
    assert verdict["measured"] == "not measured"


def test_a_claim_over_all_seeds_sees_them_together():
    claim = Claim(
        "sum", "the sum is six", ("a", "b"), together=True,
        check=lambda a, b: Verdict(sum(r.last("loss") for r in (*a, *b)) == 6, f"{len(a)} and {len(b)}"),
    )  # fmt: skip
    verdict = claim.judge(results({0: {"a": 1.0, "b": 2.0}, 1: {"a": 3.0, "b": 0.0}}))
    assert verdict["holds"] is True
    assert verdict["measured"] == "2 and 2"
    assert verdict["seeds"] == []


def test_a_claim_without_its_runs_is_not_measured():
    claim = Claim("both", "Both are there.", ("a", "b"), lambda a, b: Verdict(True, ""))
    run = Result("a", 0, {}, [{"loss": 1.0}], 0.0, {})
    assert not claim.is_measured({0: {"a": run}, 1: {}})
    assert claim.is_measured({0: {"a": run}, 1: {"a": run, "b": run}})
