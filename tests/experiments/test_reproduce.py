from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from psgd.experiments.figure import read
from psgd.experiments.pool import Finished
from psgd.experiments.reproduce import Order, Planned, Written, reproduce
from tests.experiments.runs import toy


def order(mark, seeds=None):
    return [Order.of(toy(mark), False, seeds)]


def executed(mark) -> int:
    return len(mark.read_text().splitlines()) if mark.exists() else 0


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_second_command_does_nothing_twice(tmp_path, jobs):
    mark = tmp_path / "mark"
    first = list(reproduce(order(mark), tmp_path / "out", jobs=jobs, device="cpu"))
    assert executed(mark) == 4
    again = list(reproduce(order(mark), tmp_path / "out", jobs=jobs, device="cpu"))
    assert executed(mark) == 4
    assert isinstance(again[0], Planned)
    assert len(again[0].finished) == 4
    claims = [event.summary["claims"] for event in first + again if isinstance(event, Written)]
    assert claims[0] == claims[1]


def test_stopped_half_way_it_carries_on(tmp_path):
    """At most the run under way is lost."""
    mark = tmp_path / "mark"
    events = reproduce(order(mark), tmp_path / "out", jobs=1, device="cpu")
    for _ in islice((event for event in events if isinstance(event, Finished)), 2):
        pass
    next(events)  # in the middle of the third
    events.close()
    assert executed(mark) == 3
    rest = list(reproduce(order(mark), tmp_path / "out", jobs=1, device="cpu"))
    assert executed(mark) == 5
    whole = list(reproduce(order(mark), tmp_path / "whole", jobs=1, device="cpu"))
    claims = [event.summary["claims"] for event in rest + whole if isinstance(event, Written)]
    assert claims[0] == claims[1]


def test_more_seeds_only_need_the_new_ones(tmp_path):
    mark = tmp_path / "mark"
    list(reproduce(order(mark, seeds=1), tmp_path / "out", jobs=1, device="cpu"))
    assert executed(mark) == 2
    *_, last = reproduce(order(mark, seeds=3), tmp_path / "out", jobs=1, device="cpu")
    assert executed(mark) == 6
    assert isinstance(last, Written)
    assert last.summary["settings"]["seeds"] == 3


def test_sizes_do_not_get_mixed_up(tmp_path):
    mark = tmp_path / "mark"
    list(reproduce(order(mark), tmp_path / "out", jobs=1, device="cpu"))
    list(reproduce([Order.of(toy(mark), True)], tmp_path / "out", jobs=1, device="cpu"))
    assert executed(mark) == 4 + 6


def test_another_number_of_seeds_is_for_all_runs():
    figure = replace(toy(), full={"count": 3, "seeds": 5, "other_seeds": 2})
    assert Order.of(figure, True, 4).size == {"count": 3, "seeds": 4, "other_seeds": 4}
    assert Order.of(figure, True).size == figure.full


def test_seeds_begin_with_the_first_one(tmp_path):
    """The runs of the k-th seed are those of the seed k, with another seed."""

    def of_first_two(size, seed):
        return toy().runs(size, seed)[: 2 if seed < 1 else 1]

    figure = replace(toy(), runs=of_first_two)
    orders = [Order.of(figure, False, 2, first_seed) for first_seed in (0, 100)]
    plain, later = ([(run.label, run.seed) for run in order.runs("cpu")] for order in orders)
    assert plain == [("a", 0), ("b", 0), ("a", 1)]
    assert later == [("a", 100), ("b", 100), ("a", 101)]
    *_, written = reproduce([orders[1]], tmp_path, jobs=1, device="cpu")
    assert isinstance(written, Written)
    assert written.summary["seeds"] == [100, 101]
    assert [seed["seed"] for seed in written.summary["claims"][0]["seeds"]] == [100]
    assert list(read(tmp_path, "toy")) == [100, 101]


def test_what_is_unfinished(tmp_path):
    (wanted,) = order(tmp_path / "mark")
    assert wanted.unfinished(tmp_path, "cpu")
    list(reproduce([wanted], tmp_path, jobs=1, device="cpu"))
    assert not wanted.unfinished(tmp_path, "cpu")
    assert wanted.unfinished(tmp_path, "cuda")
