from __future__ import annotations

from itertools import islice

import pytest

from psgd.experiments.pool import Finished
from psgd.experiments.reproduce import Order, Planned, Written, reproduce
from tests.experiments.runs import toy


def order(mark, seeds=None):
    figure = toy(mark)
    return [Order(figure, figure.quick, "quick", seeds)]


def executed(mark) -> int:
    return len(mark.read_text().splitlines()) if mark.exists() else 0


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
    figure = toy(mark)
    list(reproduce([Order(figure, figure.full, "full")], tmp_path / "out", jobs=1, device="cpu"))
    assert executed(mark) == 4 + 6
