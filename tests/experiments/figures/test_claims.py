"""Claims on curves made up for them: what decides, and what must not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psgd.experiments.figures import classifiers, complexity, fig2, fig3, fig6, rnn2d, rnn_suite
from psgd.experiments.hessians import SCENARIOS
from psgd.experiments.long_memory import PROBLEMS
from psgd.experiments.run import Result
from tests.experiments.runs import result


def digits(errors: list[float], losses: list[float], label: str = "a", test_loss: float = 1.0) -> Result:
    epochs = [(k + 1) / 10 for k in range(len(errors))]
    return result(label, epoch=epochs, error=errors, loss=losses, **{"test loss": [test_loss] * len(errors)})


FALLING = [1 / (k + 1) for k in range(20)]
BEST_HALF_WAY = [0.05] * 8 + [0.02] * 4 + [0.03] * 8


class TestClassifiers:
    @pytest.mark.parametrize("errors", [BEST_HALF_WAY, [0.02] * 20, [0.05] * 10 + [0.02] * 10])
    def test_a_curve_overfits_or_it_does_not(self, errors):
        curve, sgd = digits(errors, FALLING), digits(errors, [1.0] * 20)
        assert classifiers.overfits(curve).holds != classifiers.no_overfitting(curve, sgd).holds
        assert classifiers.overfits(curve).holds == (errors is BEST_HALF_WAY)

    def test_one_bad_point_is_not_overfitting(self):
        assert not classifiers.overfits(digits([0.02] * 19 + [0.022], FALLING)).holds

    def test_who_does_not_fit_cannot_overfit(self):
        idle = digits(BEST_HALF_WAY, [1.0] * 20)
        assert not classifiers.overfits(idle).holds
        assert not classifiers.no_overfitting(idle, idle).holds

    def test_a_rival_that_diverged_has_not_won(self):
        c3 = digits([0.5] + [0.02] * 19, FALLING, "c3")
        poor = digits([0.2] * 20, FALLING, "poor")
        gone = digits([0.3], [float("inf")], "gone")
        assert classifiers.perform_poorly(poor, gone, c3).holds
        assert not classifiers.perform_poorly(digits([0.025] * 20, FALLING, "good"), gone, c3).holds

    def test_rivals_are_compared_as_far_as_all_were_trained(self):
        c3 = digits([0.1] * 10 + [0.02] * 10, FALLING, "c3")
        short = digits([0.12] * 10, FALLING[:10], "short")
        verdict = classifiers.perform_poorly(short, c3)
        assert not verdict.holds
        assert "after 1 epochs" in verdict.measured


class TestFigure2:
    def curve(self, values: dict[int, list[float]]) -> Result:
        count = len(SCENARIOS)
        columns = {f"{n}: mean |λ|": values.get(n, [1.0] * 10) for n in range(1, count + 1)}
        return result("preconditioner 3", pairs=[float(k) for k in range(1, 11)], **columns)

    def test_rates_are_similar_where_both_arrive(self):
        soon, later = [1e-5] * 3 + [1.0] * 7, [1e5] * 5 + [1.0] * 5
        assert fig2.similar_rates(self.curve({1: soon, 2: later})).holds
        assert not fig2.similar_rates(self.curve({1: soon, 2: [1e5] * 9 + [1.0]})).holds

    def test_they_are_not_where_nothing_arrives(self):
        frozen = {n: [1e-5] * 10 for n in range(1, 9)}
        assert not fig2.similar_rates(self.curve(frozen)).holds


class TestFigure3:
    def test_divergence_is_seen_by_the_loss(self):
        """The interference is the same for all scales of the taps."""
        assert fig3.diverges(result(iteration=[100], loss=[1e255], ISI=[5.4])).holds
        assert fig3.diverges(result(iteration=[100], loss=[float("nan")], ISI=[5.4])).holds
        assert not fig3.diverges(result(iteration=[100], loss=[0.2], ISI=[5.4])).holds

    def test_nothing_is_accelerated_that_does_not_arrive(self):
        stuck = result(iteration=[100.0 * k for k in range(20)], ISI=[1.0] * 20)
        assert not fig3.accelerates(stuck, stuck).holds


def test_the_share_of_solved_seeds_decides():
    solved = result("a", iteration=[100, 200], loss=[0.1, 0.009])
    stuck = result("a", iteration=[100, 200], loss=[0.17, 0.17])
    check = fig6.solved_share(0.9)
    assert check([solved] * 9 + [stuck]).holds
    assert not check([solved] * 8 + [stuck] * 2).holds
    assert check([stuck]).measured == "0 of 1 seeds solved"


class TestSuite:
    def curve(self, problem: str, solved: bool) -> Result:
        made = result(problem, iteration=[100, 200], wrong=[0.5, 0.009 if solved else 0.01])
        return replace(made, settings={"problem": problem})

    def test_every_problem_has_to_be_solved_on_four_of_five_seeds(self):
        good, fair, bad = ([self.curve("XOR", k < count) for k in range(5)] for count in (5, 4, 3))
        assert rnn_suite.solves_all(good, fair).holds
        assert rnn_suite.solves_all(good, fair).measured == "2 of 2 problems, XOR on 4 of 5 seeds"
        verdict = rnn_suite.solves_all(good, bad)
        assert not verdict.holds
        assert verdict.measured == "1 of 2 problems, XOR on 3 of 5 seeds"

    def test_a_problem_counts_once_for_a_rival_with_two_learning_rates(self):
        ours = [self.curve(problem, k < 2) for k, problem in enumerate(PROBLEMS)]
        once = [self.curve("XOR", True), self.curve("XOR", True), self.curve("addition", False)]
        assert rnn_suite.solves_more_than("Adam")(*ours, *once).holds
        twice = [self.curve("XOR", True), self.curve("addition", True)]
        verdict = rnn_suite.solves_more_than("Adam")(*ours, *twice)
        assert not verdict.holds
        assert verdict.measured == "2 problems against 2 by Adam"


class TestReader:
    def curve(self, images: int, errors: list[float]) -> Result:
        made = result("PSGD", epoch=[float(k) for k in range(len(errors))], error=errors)
        return replace(made, settings={"images": images})

    @pytest.mark.parametrize(("images", "level"), [(60_000, 0.006), (4_000, 0.08)])
    def test_the_error_at_the_end_decides(self, images, level):
        assert rnn2d.reads(self.curve(images, [0.1, level])).holds
        assert not rnn2d.reads(self.curve(images, [level, level + 1e-4])).holds
        assert not rnn2d.reads(self.curve(images, [level, float("nan")])).holds


def test_the_time_of_an_update_is_what_gradients_and_steps_leave():
    times = {"gradient": 1.0, "SGD": 1.5, "PSGD, no update": 2.0, "PSGD, no update, besides gradients": 1.0}
    times |= {f"PSGD, update every {k}": 2.0 + (1 + 7) / k for k in (1, 2, 5, 10)}
    times |= {f"PSGD, update every {k}, besides gradients": 1.0 + 7 / k for k in (1, 2, 5, 10)}
    times |= {complexity.PRECONDITIONING: 0.5, complexity.FITTING: 3.0}
    measured = result(**{name: [seconds] for name, seconds in times.items()})
    assert complexity.update_share(measured) == pytest.approx(7 / 10)
    assert complexity.update_share(measured, 10) == pytest.approx(0.7 / 2.8)
    assert complexity.relative(measured) == pytest.approx(10 / 1.5)
    assert not complexity.doubles(measured).holds
    assert not complexity.gradients_dominate(measured).holds
    assert complexity.cheap_when_rare(measured).holds
    assert complexity.floor(measured) == pytest.approx(1.5 + 0.5 + 1.0 + 3.0)
    assert complexity.floor(measured, 10) == pytest.approx(1.5 + 0.5 + 0.4)
    assert complexity.arithmetic_share(measured) == pytest.approx(0.3)
    assert not complexity.close_to_floor(measured).holds
    assert complexity.close_to_floor(result(**{**{n: [s] for n, s in times.items()}, "SGD": [2.2]})).holds


def test_defaults_may_cost_three_iterations_of_sgd():
    assert complexity.defaults_cost_little(result(SGD=[1.0], PSGD=[3.0])).holds
    assert not complexity.defaults_cost_little(result(SGD=[1.0], PSGD=[3.1])).holds
