from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from psgd.bench import hard, peers, problems, protocol
from psgd.bench.benchmark import Plan
from psgd.bench.isolate import Outcome, SkippedError, Task
from psgd.bench.objectives import DENSE, NEWTON, PROBLEMS
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
@pytest.mark.parametrize("peer", [NEWTON, DENSE], ids=lambda peer: peer.name)
def test_psgd_takes_the_problem(name, peer):
    """A few steps do not break it."""
    problem = replace(PROBLEMS[name], every=2)
    row = problems.run(problem, peer, peer.lr, "cpu", 1, seconds=1e-9)
    assert row["iteration"] == 2
    assert row["value"] <= problem.start("cpu", 1).judge()


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


def rows_of(role, *ends, lr=0.1):
    names = ("seed", "iteration", "seconds", "value", "reached")
    return [{"role": role, "lr": lr, **dict(zip(names, end, strict=True))} for end in ends]


def outcome(*rows, name="rosenbrock2", peer=peers.SGD):
    settings = {"problem": PROBLEMS[name], "peer": peer, "seconds": 5.0}
    return Outcome(Task(f"{name}, {peer.name}", problems.work, settings), list(rows), 1.0)


TUNED = rows_of("tuned", (7, 20, 1.5, 1e-9, True), (8, 30, 2.5, 1e-9, True), (9, 10, 0.5, 1e-9, True), lr=0.3)
DEFAULTS = rows_of("default", (7, 90, 5.0, 0.5, False), (8, 40, 4.0, 1e-9, True), (9, 90, 5.0, 0.7, False))


def test_tuned_and_default_have_a_row_each_with_their_spread():
    found = outcome(*rows_of("tuning", (100, 5, 0.1, 1e-9, True)), *TUNED, *DEFAULTS)
    rows = problems.table([found]).rows
    assert rows[0] == ["rosenbrock2", "", "≤ 5", "", "< 1e-08"]
    assert rows[1] == ["  SGD", "0.3", "1.5 (0.5–2.5)", "20 (10–30)", ""]
    assert rows[2] == ["  SGD, default", "0.1", "1 of 3: 4", "40", "0.6 (0.5–0.7)"]
    assert problems.seconds_of(found, "tuned") == 1.5
    assert problems.seconds_of(found, "default") is None  # most seeds did not reach it
    assert protocol.TEXT in problems.table([found]).caption
    lost = outcome(*rows_of("tuned", (7, 10, 5.0, 0.5, False)))
    assert problems.table([lost]).rows[1:] == [["  SGD", "0.1", "–", "–", "0.5"], ["  SGD, default", *["–"] * 4]]
    for some in ([], [lost], [found, outcome()]):
        assert images(problems.draw(some), "problems")["png"]


def test_what_an_interrupted_run_has_not_measured_is_said():
    some = [outcome(), outcome(peer=peers.ADAM), outcome(name="tensor")]
    rows = problems.table(some).rows
    assert rows[5] == ["tensor", "", "≤ 5", "", "< 1e-06"]
    assert rows[8] == ["  Adam", "", "", "", "not measured"]
    texts = [text.get_text() for panel in problems.draw(some).axes for text in panel.texts]
    assert texts == ["not reached"] * 3 + ["not measured"]


def test_each_method_is_tuned_with_one_seed_and_judged_with_others():
    """While it is tuned, a learning rate is given up when it needs longer than the best before it."""
    problem = replace(PROBLEMS["rosenbrock2"], target=3.9, every=1)
    rows = list(problems.work(problem=problem, peer=peers.ADAM, device="cpu", seconds=0.2, seeds=(7, 8)))
    tuning = [row for row in rows if row["role"] == "tuning"]
    assert {row["seed"] for row in tuning} == {protocol.TUNING_SEED}
    assert tuning[0]["lr"] == peers.ADAM.lr
    assert len({row["lr"] for row in tuning}) == len(tuning) >= 7
    best = min((row for row in tuning if row["reached"]), key=lambda row: row["seconds"])
    assert [(row["role"], row["seed"], row["lr"]) for row in rows[len(tuning) :]] == [
        *(("tuned", seed, best["lr"]) for seed in (7, 8)),
        *(("default", seed, peers.ADAM.lr) for seed in (7, 8)),
    ]
    shortest = 0.2
    for row in tuning:  # one more evaluation than allowed at most
        assert row["seconds"] < shortest + 0.1
        shortest = min(shortest, row["seconds"]) if row["reached"] else shortest


def test_a_run_ends_at_the_target_or_when_its_time_is_over():
    problem = PROBLEMS["rosenbrock2"]
    row = problems.run(problem, NEWTON, NEWTON.lr, "cpu", 7, seconds=5.0)
    assert row["reached"] == (row["value"] < problem.target) == (row["seconds"] < 5.0)
    diverged = problems.run(problem, peers.SGD, 1e9, "cpu", 7, seconds=5.0)
    assert not diverged["reached"]
    assert diverged["seconds"] < 5.0


def test_tasks():
    chosen = [peers.SGD, peers.LBFGS]
    assert len(problems.tasks(Plan(peers=chosen))) == 5 * len(PROBLEMS) - 2  # two are too large for a dense one
    quick = problems.tasks(Plan(peers=chosen, quick=True, model="zebra"))
    names = ["PSGD", "PSGD, dense", "PSGD, whitening", "SGD", "LBFGS"]
    assert [task.label for task in quick] == [f"zebra, {name}" for name in names]
    assert quick[0].settings["seconds"] < PROBLEMS["zebra"].seconds
    assert quick[0].settings["seeds"] == protocol.TEST_SEEDS[:1]
    hard = problems.tasks(Plan(model="hard"))
    names = [task.settings["problem"].name for task in hard]
    assert names[::3] == ["rosenbrock2", "rosenbrock100", "logistic", "tensor"]
    assert [len(task.settings["seeds"]) for task in hard[::3]] == [1, 1, 3, 3]


@pytest.mark.usefixtures("quick_processes")
def test_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PROBLEMS, "rosenbrock2", replace(PROBLEMS["rosenbrock2"], seconds=0.4, target=3.5))
    assert cli.main(["bench", "problems", "--quick", "--model", "rosenbrock2", "--peers", "adam"]) == 0
    found = json.loads((tmp_path / "bench" / "problems.json").read_text())
    assert [one["failure"] for one in found["measurements"]] == [None] * 4
    assert len(found["table"]["rows"]) == 9
    assert "< 3.5" in capsys.readouterr().out
