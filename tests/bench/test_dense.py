from __future__ import annotations

import torch

from psgd.bench import dense
from psgd.bench.benchmark import Plan
from psgd.bench.isolate import Outcome, Task, measure
from psgd.experiments.drawing import images


def test_all_three_times_are_measured_and_compared():
    task = Task("n = 65", dense.work, {"n": 65, "dtype": torch.float64, "device": "cpu", "seconds": 0.01})
    outcome = measure(task)
    assert outcome.failure is None
    assert set(outcome.row) == {"n", dense.RANK_TWO, dense.PRODUCT, dense.FIT}
    assert all(value > 0 for value in outcome.row.values())
    (row,) = dense.table([outcome]).rows
    assert row[0] == "n = 65"
    assert float(row[-1]) > 0
    assert images(dense.draw([outcome]), "dense")["png"]


def test_what_is_missing_is_a_dash():
    task = Task("n = 65", dense.work)
    for rows in ([], [{"n": 65, dense.RANK_TWO: 1.0}]):
        outcome = Outcome(task, rows, 1.0, "timed out after 1 s")
        assert dense.table([outcome]).rows[0][-1] == "–"
        assert images(dense.draw([outcome]), "dense")["svg"]


def test_the_large_sizes_are_for_a_gpu():
    assert [task.label for task in dense.tasks(Plan())] == ["n = 401", "n = 1001", "n = 2001"]
    assert [task.label for task in dense.tasks(Plan("cuda"))][-1] == "n = 16384"
    assert {task.settings["dtype"] for task in dense.tasks(Plan("cuda"))} == {torch.float32}
    assert len(dense.tasks(Plan(quick=True))) == 2
    assert {task.limit for task in dense.tasks(Plan(limit=7))} == {7}
