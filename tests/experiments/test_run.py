from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from psgd.experiments import run as module
from tests.experiments.runs import result, run


def test_rows_depend_on_seed_and_settings_alone():
    first, again, other = ([row for row, _ in r.execute()] for r in (run(), run(), run(seed=1)))
    assert first == again
    assert first != other


def test_a_run_has_one_thread():
    torch.set_num_threads(2)
    try:
        assert {row["threads"] for row, _ in run().execute()} == {1}
    finally:
        torch.set_num_threads(1)


def test_seconds_grow():
    seconds = [s for _, s in run(sleep=0.002).execute()]
    assert seconds == sorted(seconds)
    assert seconds[-1] >= 0.006


@pytest.mark.parametrize(
    "other",
    [run(seed=1), run("b"), run(count=4), replace(run(), figure="x"), replace(run(), device="cuda")],
    ids=["seed", "label", "setting", "figure", "device"],
)
def test_what_changes_the_result_changes_the_key(other):
    assert other.key != run().key


def test_another_version_of_psgd_is_another_run(monkeypatch):
    before = run().key
    monkeypatch.setattr(module, "__version__", "99")
    assert run().key != before


def test_what_does_not_change_the_result_does_not_change_the_key():
    assert replace(run(), place={"data": "x"}, seconds=9.0, rows=7, alone=True).key == run().key


class TestResult:
    curve = result(iteration=[1, 2, 3], loss=[4.0, 2.0, 1.0])

    def test_last_is_a_mean(self):
        assert self.curve.last("loss") == 1
        assert self.curve.last("loss", 2) == 1.5

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_curve_that_ends_badly_ends_at_infinity(self, bad):
        assert result(iteration=[1, 2], loss=[1.0, bad]).last("loss", 2) == float("inf")

    def test_first_below(self):
        assert self.curve.first_below("loss", 2.5) == 2
        assert self.curve.first_below("loss", 0.5) == float("inf")

    def test_columns_skip_rows_without_them(self):
        self.curve.rows[1].pop("loss")
        assert self.curve.column("loss") == [4, 1]
        assert self.curve.first_below("loss", 3) == 3


def test_the_first_seed_need_not_be_zero():
    first, second = {"a": result()}, {"a": result(seed=8)}
    assert module.of_first_seed({7: first, 8: second}) is first
