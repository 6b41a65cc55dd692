"""``psgd bench minimize``: its functions are what they say, and a run becomes a table and a picture."""

from __future__ import annotations

import pytest
import scipy.optimize

from psgd.bench import minimize
from psgd.bench.benchmark import Plan
from psgd.bench.isolate import Outcome
from psgd.experiments.drawing import images


@pytest.mark.parametrize("name", [name for name in minimize.PROBLEMS if "100" not in name])
def test_gradients_are_those_of_the_functions(name):
    function = minimize.PROBLEMS[name]()
    x = function.start + 0.1
    error = scipy.optimize.check_grad(function.value, function.gradient, x)
    assert error < 1e-5 * max(1.0, abs(function.gradient(x)).max())


def test_counts_until_the_target_and_shows_it():
    tasks = minimize.tasks(Plan(model="Himmelblau"))
    assert [task.settings["method"] for task in tasks] == [minimize.PSGD, *minimize.SCIPY]
    outcomes = [Outcome(task, list(task.work(**task.settings)), 0.0) for task in tasks]
    assert all(minimize.reached(outcome) for outcome in outcomes)
    assert all(0 < outcome.row["gradients"] <= 60 for outcome in outcomes)
    table = minimize.table(outcomes)
    assert len(table.rows) == 5
    assert images(minimize.draw(outcomes), "minimize")["png"]
    assert minimize.table([Outcome(tasks[0], [], 0.0, "failed")]).rows[1][1] == "–"
    assert len(minimize.tasks(Plan(quick=True))) < len(minimize.tasks(Plan()))
