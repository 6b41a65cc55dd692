from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from psgd.bench import hard, peers, problems
from psgd.bench.benchmark import Plan
from psgd.bench.isolate import Outcome, SkippedError, Task
from psgd.bench.objectives import PROBLEMS
from psgd.cli import main as cli
from psgd.experiments.drawing import images

SMALL = [name for name in PROBLEMS if name != "mnist"]


@pytest.mark.parametrize("name", SMALL)
def test_a_problem_starts_over_its_target_and_has_a_gradient(name):
    problem = PROBLEMS[name]
    start = problem.start("cpu", 0)
    assert start.judge() > problem.target
    batch = next(start.data)
    loss = start.loss(*batch)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in start.params)
    again = problem.start("cpu", 0)
    assert again.judge() == pytest.approx(start.judge(), rel=1e-12)
    assert again.loss(*next(again.data)) == loss


@pytest.mark.parametrize("name", SMALL)
def test_psgd_takes_the_problem(name):
    """Its choices are for these shapes, and a few steps do not break it."""
    problem = replace(PROBLEMS[name], every=2)
    rows = list(problems.work(problem=problem, peer=problem.by_hand(1), device="cpu", seconds=1e-9))
    assert [row["iteration"] for row in rows] == [0, 2] * 3
    assert rows[-1]["value"] < 2 * rows[0]["value"] + 1


def test_the_best_of_logistic_regression_is_the_best():
    start = PROBLEMS["logistic"].start("cpu", 0)
    optimizer = torch.optim.LBFGS(start.params, max_iter=1000, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = start.loss()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert -1e-12 < start.judge() < 1e-6


def test_known_minima():
    start = hard.start_rosenbrock("cpu", 0, 5)
    with torch.no_grad():
        start.params[0].fill_(1)
    assert start.judge() == 0


def test_mnist_is_skipped_where_it_is_missing_and_never_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("PSGD_DATA", str(tmp_path))
    with pytest.raises(SkippedError, match="skipped: cannot find train-images"):
        PROBLEMS["mnist"].start("cpu", 0)
    monkeypatch.delenv("PSGD_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SkippedError, match="skipped: cannot find train-images"):
        PROBLEMS["mnist"].start("cpu", 0)


def test_each_method_has_its_step_sizes():
    problem = PROBLEMS["zebra"]
    assert sorted(problem.rates(peers.SGD)) == list(problem.plain)
    assert problem.rates(peers.ADAM) == [problem.adaptive[k] for k in (1, 0, 2)]
    assert sorted(problem.rates(peers.MOMENTUM)) == pytest.approx([0.3 * rate for rate in problem.plain])
    assert problem.rates(peers.LBFGS) == [1.0]
    lr = problem.psgd["lr"]
    assert problem.rates(problem.by_hand(1)) == [lr, lr / 2, 2 * lr]


def outcome(*rows, name="rosenbrock2", peer=peers.SGD):
    settings = {"problem": PROBLEMS[name], "peer": peer, "seconds": 5.0}
    task = Task(f"{name}, {peer.name}", problems.work, settings)
    return Outcome(task, [dict(zip(("lr", "iteration", "seconds", "value"), row, strict=True)) for row in rows], 1.0)


def test_the_best_step_size_is_the_first_at_the_target():
    found = outcome((0.1, 0, 0.0, 4.0), (0.1, 10, 2.0, 1e-9), (0.3, 20, 1.5, 1e-9), (1.0, 10, 0.1, float("nan")))
    assert problems.best(found)["lr"] == 0.3
    row = problems.table([found]).rows[1]
    assert row == ["  SGD", "0.3", "1.5", "20", "1e-09"]
    lost = outcome((0.1, 0, 0.0, 4.0), (0.1, 10, 2.0, 0.5), (0.3, 10, 2.0, float("inf")))
    assert problems.best(lost) is None
    assert problems.table([lost]).rows[1] == ["  SGD", "0.1", "–", "–", "0.5"]
    assert problems.table([outcome()]).rows[1] == ["  SGD", "–", "–", "–", "–"]
    for some in ([], [lost], [found, outcome()]):
        assert images(problems.draw(some), "problems")["png"]


def test_what_an_interrupted_run_has_not_measured_is_said():
    some = [outcome(), outcome(peer=peers.ADAM), outcome(name="tensor")]
    rows = problems.table(some).rows
    assert rows[3] == ["tensor", "", "≤ 5", "", "< 1e-06"]
    assert rows[5] == ["  Adam", "", "", "", "not measured"]
    texts = [text.get_text() for panel in problems.draw(some).axes for text in panel.texts]
    assert texts == ["not reached"] * 3 + ["not measured"]


def test_a_step_size_is_given_up_when_another_was_faster():
    problem = replace(PROBLEMS["rosenbrock2"], target=3.9, adaptive=(1e-9, 0.1, 1e-8))
    rows = list(problems.work(problem=problem, peer=peers.ADAM, device="cpu", seconds=30.0))
    assert rows[-1]["seconds"] < 10
    assert {row["lr"] for row in rows} == {0.1, 1e-9, 1e-8}


def test_rows_are_not_too_many_and_the_last_is_the_end():
    problem = replace(PROBLEMS["rosenbrock2"], every=1)
    rows = list(problems.work(problem=problem, peer=problem.by_hand(1), device="cpu", seconds=0.5))
    rows = [row for row in rows if row["lr"] == problem.psgd["lr"]]
    assert len(rows) <= problems.ROWS + 2
    assert rows[-1]["value"] < problem.target or rows[-1]["seconds"] >= 0.5


def test_tasks():
    chosen = [peers.SGD, peers.LBFGS]
    assert len(problems.tasks(Plan(peers=chosen))) == 5 * len(PROBLEMS)
    quick = problems.tasks(Plan(peers=chosen, quick=True, model="zebra"))
    names = ["PSGD", "PSGD, whitening", "PSGD, tuned by hand", "SGD", "LBFGS"]
    assert [task.label for task in quick] == [f"zebra, {name}" for name in names]
    assert quick[0].settings["seconds"] < PROBLEMS["zebra"].seconds
    hard = problems.tasks(Plan(model="hard"))
    names = [task.settings["problem"].name for task in hard]
    assert names[::3] == ["rosenbrock2", "rosenbrock100", "logistic", "tensor"]


@pytest.mark.usefixtures("quick_processes")
def test_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PROBLEMS, "rosenbrock2", replace(PROBLEMS["rosenbrock2"], seconds=1.0, target=3.5))
    assert cli.main(["bench", "problems", "--quick", "--model", "rosenbrock2", "--peers", "adam"]) == 0
    found = json.loads((tmp_path / "bench" / "problems.json").read_text())
    assert [one["failure"] for one in found["measurements"]] == [None] * 4
    assert len(found["table"]["rows"]) == 5
    assert "< 3.5" in capsys.readouterr().out
