from __future__ import annotations

import pytest

from psgd.bench import kron
from psgd.bench.benchmark import Plan
from psgd.bench.isolate import Task, measure
from psgd.experiments.drawing import images


@pytest.mark.usefixtures("quick_processes")
def test_both_kinds_are_measured_with_and_without_update():
    tasks = kron.tasks(Plan(quick=True))
    assert [task.label for task in tasks] == [kron.TRIANGULAR, kron.INVERSE_FREE]
    small = {"shapes": [(4, 1), (4, 3)], "seconds": 0.01}
    outcomes = [measure(Task(task.label, kron.work, {**task.settings, **small})) for task in tasks]
    assert [outcome.failure for outcome in outcomes] == [None, None]
    assert all(row[kron.WITH] > row[kron.WITHOUT] > 0 for outcome in outcomes for row in outcome.rows)
    table = kron.table(outcomes)
    assert [row[0] for row in table.rows] == ["1 × 4²", "3 × 4²"]
    assert all(cell != "–" for row in table.rows for cell in row)
    for some in (outcomes, outcomes[:1], []):
        assert images(kron.draw(some), "kron")["png"]


def test_a_cpu_is_spared_what_would_take_it_minutes():
    def shapes(plan):
        return kron.tasks(plan)[0].settings["shapes"]

    assert (2048, 48) in shapes(Plan("cuda"))
    assert (2048, 1) not in shapes(Plan())
    assert (256, 48) in shapes(Plan())
    assert [task.label for task in kron.tasks(Plan("cuda"))] == [kron.TRIANGULAR, kron.INVERSE_FREE, kron.BF16]
