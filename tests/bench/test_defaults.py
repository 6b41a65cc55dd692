from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from psgd.bench import defaults
from psgd.bench.benchmark import Plan
from psgd.bench.isolate import Outcome, SkippedError, Task
from psgd.bench.panel import PROBLEMS
from psgd.bench.smooth import Numbers
from psgd.cli import main as cli
from psgd.experiments.drawing import images


def outcome(*rows, name="quadratic", method="AdamW", failure=None):
    """Outcome of rows ``(lr, reached, value)``."""
    found = [
        {"lr": lr, "seed": 0, "reached": reached, "evaluations": 9, "seconds": 1.0, "start": 1.0, "value": value}
        | {"finite": value == value}
        for lr, reached, value in rows
    ]
    settings = {"problem": PROBLEMS[name], "method": method}
    return Outcome(Task(f"{name}, {method}", defaults.work, settings), found, 1.0, failure)


SOLVED = [(None, 1200, 0.1), (None, None, 5.0), (None, 1000, 0.1), (0.1, 7, 0.1), (1.0, None, float("nan"))]
LOST = [(None, None, 3.0), (None, None, 2.0), (None, 7, 0.1), (0.1, None, 1e204)]


def test_a_method_has_its_own_step_size_unless_it_is_given_another():
    for method in defaults.METHODS:
        model = Numbers(torch.zeros(2))
        default = defaults.make(method, model, None)
        other = defaults.make(method, model, 0.25)
        assert default.param_groups[0]["lr"] == default.defaults["lr"] != 0.25
        assert other.param_groups[0]["lr"] == 0.25
    assert defaults.make("AdamW", model, None).defaults["lr"] == 1e-3


def test_the_recommendation_depends_on_the_kind_alone():
    assert defaults.recommended(PROBLEMS["rosenbrock"]) == defaults.CURVATURE
    assert defaults.recommended(PROBLEMS["physics"]) == defaults.CURVATURE
    assert defaults.recommended(PROBLEMS["transformer"]) == defaults.WHITENING


def test_the_table_has_medians_and_sums():
    some = [outcome(*SOLVED), outcome(*LOST, method=defaults.CURVATURE)]
    table = defaults.table(some)
    assert table.columns == ("", *defaults.METHODS, defaults.ONE_LINE)
    column = {name: k for k, name in enumerate(table.columns)}
    quadratic, solved, won, broken, diverged, *_ = table.rows
    assert quadratic[column["AdamW"]] == "1,200; 1/2"
    assert quadratic[column[defaults.CURVATURE]] == "– (2); 0/1"
    assert quadratic[column[defaults.ONE_LINE]] == "– (2); 0/1"
    assert quadratic[column[defaults.WHITENING]] == "not measured"
    assert [row[column["AdamW"]] for row in (solved, won, broken)] == ["1 of 1", "1 of 2", "1 of 5"]
    assert diverged[column["AdamW"]] == diverged[column[defaults.CURVATURE]].replace("4", "5") == "1 of 5"
    assert [row[column[defaults.ONE_LINE]] for row in (solved, won, broken)] == ["0 of 1", "0 of 1", "0 of 4"]


def test_runs_at_the_same_place_of_the_grid_are_compared():
    """A run wins that reaches the target sooner, or alone; among those that do not reach it, the lower one."""
    nan = float("nan")
    theirs = [(None, 1, 0.0), (1e-4, None, 3.0), (1e-3, 9, 0.1), (1e-2, 9, 0.1), (0.1, None, nan), (1.0, 9, 0.1)]
    mine = [(None, 9, 0.0), (1e-4, None, 2.0), (1e-3, 7, 0.1), (1e-2, 9, 0.1), (0.1, None, 5.0), (1.0, None, nan)]
    other = [(None, None, 1.0), (1e-4, 5, 0.1), (1e-3, None, 2.0)]  # one that was interrupted
    some = [
        outcome(*theirs),
        outcome(*mine, method=defaults.CURVATURE),
        outcome(*other, name="cnn"),
        outcome(*other[:2], name="cnn", method=defaults.WHITENING),
    ]
    table = defaults.table(some)
    column = {name: k for k, name in enumerate(table.columns)}
    won, lower = table.rows[-2:]
    assert "won against AdamW, and lost" in won[0]
    assert [won[column[name]] for name in ("AdamW", defaults.CURVATURE, defaults.WHITENING)] == ["–", "1, 1", "0, 0"]
    assert [lower[column[name]] for name in ("AdamW", defaults.CURVATURE)] == ["–", "2, 0"]
    assert won[column[defaults.ONE_LINE]] == "1, 1"
    assert won[column["SGD, momentum 0.9"]] == "–"
    rows = [{"reached": None, "finite": True, "value": value} for value in (1.0, 2.0)]
    assert defaults.lower(*rows)
    assert not defaults.lower(*reversed(rows))


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    """A run that was kept gives the same row, also if its value is not finite and it has the default step size."""
    problem = replace(PROBLEMS["rosenbrock"], evaluations=20)
    settings = {"problem": problem, "method": "SGD, momentum 0.9", "rates": [None, 1.0], "seeds": [0]}
    first = list(defaults.work(**settings, runs=tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    assert not first[1]["finite"]
    with monkeypatch.context() as patched:
        patched.setattr(defaults.panel, "run", lambda *_: pytest.fail("it was run again"))
        again = list(defaults.work(**settings, runs=tmp_path, until=0.0))
    for row in first + again:  # files have no infinity
        row["value"] = row["value"] if row["finite"] else None
    assert again == first
    assert again[0]["lr"] is None
    assert again[0]["reached"] is None
    more = defaults.work(**{**settings, "rates": [None, 0.1]}, runs=tmp_path, until=0.0)
    assert next(more) == first[0]
    with pytest.raises(SkippedError, match="the same command continues"):
        next(more)
    changed = {**settings, "problem": replace(problem, target=1e9)}
    assert next(defaults.work(**changed, runs=tmp_path))["reached"] == 1


def test_what_failed_is_said():
    assert defaults.table([outcome(failure="timed out")]).rows[0][1] == "failed"
    some = [outcome(failure="timed out"), outcome(*LOST, method=defaults.WHITENING)]
    texts = [text.get_text() for axes in defaults.draw(some).axes for text in axes.texts]
    assert texts == ["failed", "not measured", "not reached", "not measured"]
    for group in ([], [outcome(*SOLVED)], some):
        assert images(defaults.draw(group), "defaults")["png"]


def test_tasks():
    everything = defaults.tasks(Plan())
    assert len(everything) == len(PROBLEMS) * len(defaults.METHODS)
    seeds = {task.settings["problem"].name: task.settings["seeds"] for task in everything}
    assert (seeds["rosenbrock"], seeds["cnn"]) == ([0], [0, 1, 2])
    assert all(task.settings["rates"] == [None, *defaults.RATES] for task in everything)
    quick = defaults.tasks(Plan(quick=True))
    assert len({task.settings["problem"].name for task in quick}) == 8
    assert all(task.settings["seeds"] == [0] for task in quick)
    assert [task.label for task in defaults.tasks(Plan(model="cnn"))] == [f"cnn, {name}" for name in defaults.METHODS]


@pytest.mark.usefixtures("quick_processes")
def test_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PROBLEMS, "quadratic", replace(PROBLEMS["quadratic"], evaluations=20, target=3.0))
    assert cli.main(["bench", "defaults", "--quick", "--model", "quadratic"]) == 0
    found = json.loads((tmp_path / "bench" / "defaults.json").read_text())
    assert [one["failure"] for one in found["measurements"]] == [None] * 4
    assert [len(one["rows"]) for one in found["measurements"]] == [6] * 4
    assert found["command"] == "psgd bench defaults --device cpu --model quadratic --quick"
    assert "problems solved by defaults" in capsys.readouterr().out


@pytest.mark.usefixtures("quick_processes")
def test_parts_are_merged(tmp_path, monkeypatch, capsys):
    """Problems that were run one by one, and several measurements at the same time, give the table of the whole."""
    monkeypatch.chdir(tmp_path)
    for name in list(PROBLEMS):
        if name not in ("rosenbrock", "quadratic"):
            monkeypatch.delitem(PROBLEMS, name)
        else:
            monkeypatch.setitem(PROBLEMS, name, replace(PROBLEMS[name], evaluations=4))
    for part in (["--model", "quadratic"], ["--model", "rosenbrock", "--jobs", "3"]):
        assert cli.main(["bench", "defaults", *part]) == 0
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "bench" / "runs").iterdir()}
    assert len(kept) == 4 * 6 * (1 + 3)
    assert cli.main(["bench", "defaults", "--jobs", "2", "--total", "600"]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "bench" / "runs").iterdir()} == kept
    found = json.loads((tmp_path / "bench" / "defaults.json").read_text())
    assert [row[0] for row in found["table"]["rows"][:2]] == ["rosenbrock", "quadratic"]
    labels = [f"{name}, {method}" for name in ("rosenbrock", "quadratic") for method in defaults.METHODS]
    assert [one["label"] for one in found["measurements"]] == labels
    assert found["complete"]
    assert capsys.readouterr().err == ""
