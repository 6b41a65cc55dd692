"""Recordings and their keys; ``tests/emulated.py`` records on a CPU, ``tests/test_cuda.py`` has the real thing."""

from __future__ import annotations

import pytest
import torch

from psgd.engine.graphs import MOST

from ..emulated import Emulated


def test_the_least_used_recording_is_dropped():
    graphs = Emulated(torch.device("cpu"), 0)
    for key in range(2 * MOST):
        for _ in range(4):
            graphs((key,), lambda: None)
    assert len(graphs) == MOST
    assert (2 * MOST - 1,) in graphs
    assert (0,) not in graphs


def test_a_recording_in_use_is_kept_however_old_it_is():
    graphs = Emulated(torch.device("cpu"), 0)
    for key in range(2 * MOST):
        for _ in range(4):
            graphs("old", lambda: None)
            graphs((key,), lambda: None)
    assert "old" in graphs
    assert len(graphs) == MOST


def test_numbers_stay_at_their_places():
    graphs = Emulated(torch.device("cpu"), 0)
    first = graphs.hold("lr", [0.1, torch.tensor(0.2)], torch.float64)
    assert [float(place) for place in first] == pytest.approx([0.1, 0.2])
    second = graphs.hold("lr", [0.3, torch.tensor([0.4])], torch.float64)
    assert [place.data_ptr() for place in first] == [place.data_ptr() for place in second]
    assert [float(place) for place in second] == pytest.approx([0.3, 0.4])


def test_the_result_of_a_recording_is_where_it_was():
    graphs = Emulated(torch.device("cpu"), 0)
    source = torch.zeros(3)
    found = []
    for step in range(6):
        source.fill_(step)
        found.append(graphs("key", lambda: source + 1))
        assert torch.equal(found[-1], source + 1)
    assert all(result is found[-1] for result in found[2:])
