from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

from psgd import PSGD, Whitening, newton
from psgd.bench import panel, smooth
from psgd.bench.panel import PROBLEMS


def adamw(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def gradients(instance, count=2):
    """Gradients of the first mini-batches."""
    batches = [()] * count if instance.batches is None else islice(instance.batches, count)
    params = list(instance.model.parameters())
    return [g for batch in batches for g in torch.autograd.grad(instance.loss(batch), params)]


def test_the_panel_has_sixteen_problems_of_all_kinds():
    assert len(PROBLEMS) == 16
    assert {problem.kind for problem in PROBLEMS.values()} == {*panel.CURVATURE, "network"}
    assert all(500 <= problem.evaluations <= 5000 for problem in PROBLEMS.values())


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_starts_over_its_target_and_depends_on_its_seed_alone(name):
    problem = PROBLEMS[name]
    instance = problem.make(0)
    assert instance.value() > problem.target
    torch.rand(3)  # what others draw does not matter
    found, again, other = gradients(instance), gradients(problem.make(0)), gradients(problem.make(1))
    assert all(torch.isfinite(g).all() for g in found)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True)) != problem.random


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_value_changes_nothing(name):
    instance = PROBLEMS[name].make(0)
    state = torch.random.get_rng_state()
    assert instance.value() == instance.value()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert instance.model.training
    assert all(p.grad is None for p in instance.model.parameters())


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_method_takes_the_problem(name):
    problem = replace(PROBLEMS[name], evaluations=6)
    for make in (adamw, newton):
        run = panel.run(problem, make, 1e-4, target=-1.0)
        assert (run.reached, run.evaluations, run.finite) == (None, 6, True)


def test_known_minima():
    for make, best in ((smooth.rosenbrock, [1.0, 1.0]), (smooth.beale, [3.0, 0.5]), (smooth.chain, [1.0] * 20)):
        instance = make(0)
        (x,) = instance.model.parameters()
        x.data = torch.tensor(best, dtype=torch.float64)
        assert instance.value() == 0
    instance = smooth.logistic(0)
    assert instance.value() > 0


def test_true_weights_of_the_regression_have_no_excess():
    instance = smooth.regression(0)
    x, y = next(instance.batches)
    while len(x) < 2000:
        more = next(instance.batches)
        x, y = torch.cat([x, more[0]]), torch.cat([y, more[1]])
    (w,) = instance.model.parameters()
    start = instance.value()
    w.data = torch.linalg.lstsq(x.double(), y.double()[:, None]).solution[:, 0].float()
    assert instance.value() < 1e-3 < start
    assert (x @ w - y).square().mean().item() == pytest.approx(0.01, rel=0.2)


def test_a_run_ends_at_the_target_or_with_its_budget():
    problem = replace(PROBLEMS["quadratic"], evaluations=100)
    solved = panel.run(problem, adamw, 0.1, target=1.0)
    assert solved.reached == solved.evaluations < 100
    assert solved.value < 1.0
    lost = panel.run(problem, adamw, 1e-4)
    assert (lost.reached, lost.evaluations, lost.finite) == (None, 100, True)
    assert lost.seconds > 0


def test_two_gradients_for_a_step_count_twice():
    problem = replace(PROBLEMS["quadratic"], evaluations=100)
    steps = {}
    for name, probe in (("one", Whitening()), ("two", None)):
        made = []

        def make(model, lr, made=made, probe=probe):
            made.append(PSGD(model.parameters(), 1e-6, **({} if probe is None else {"probe": probe})))
            made[0].register_step_post_hook(lambda *_: made.append(1))
            return made[0]

        assert panel.run(problem, make).evaluations == 100
        steps[name] = len(made) - 1
    assert steps == {"one": 100, "two": 50}


def test_a_run_ends_when_it_is_not_finite():
    run = panel.run(PROBLEMS["rosenbrock"], lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr), 1.0)
    assert (run.reached, run.finite) == (None, False)
    assert not math.isfinite(run.value)
    assert run.evaluations < PROBLEMS["rosenbrock"].evaluations


def test_runs_repeat():
    problem = replace(PROBLEMS["cnn"], evaluations=5)
    first, second, other = (panel.run(problem, adamw, 1e-3, seed).value for seed in (0, 0, 1))
    assert first == second != other
