"""The host sees flags of a CPU, and never those of a device that it would have to wait for."""

from __future__ import annotations

import pytest
import torch

from psgd.ops.look import between, seen, seen_true, values_seen


def test_flags_of_a_cpu_are_seen():
    assert seen(torch.device("cpu"), lambda: torch.tensor([True, True]))
    assert not seen(torch.device("cpu"), lambda: torch.tensor([True, False]))


def test_flags_of_other_devices_are_not_even_computed():
    assert not seen(torch.device("meta"), lambda: pytest.fail("a launch for nothing"))


def test_a_flag_is_seen_to_be_true_only_on_a_cpu():
    assert seen_true(torch.tensor(True))
    assert not seen_true(torch.tensor(False))
    assert not seen_true(torch.ones((), dtype=torch.bool, device="meta"))
    assert values_seen(torch.ones(2)) == [1.0, 1.0]
    assert values_seen(torch.ones(2, device="meta")) is None


@pytest.mark.parametrize("values", [[0.5, 2.0], [1.0, 0.5], [0.25, 4.0], [0.5, torch.inf], [0.5, torch.nan]], ids=str)
def test_what_the_host_sees_between_two_numbers_is_what_a_device_says(values, monkeypatch):
    told = between(torch.tensor(values), 0.25, 4.0)
    monkeypatch.setattr("psgd.ops.look.can_look", lambda device: False)
    assert torch.equal(told, between(torch.tensor(values), 0.25, 4.0))
    assert told.tolist() == [0.25 < value < 4.0 for value in values]
