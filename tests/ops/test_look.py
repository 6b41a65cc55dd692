"""The host sees flags of a CPU, and never those of a device that it would have to wait for."""

from __future__ import annotations

import pytest
import torch

from psgd.ops.look import seen


def test_flags_of_a_cpu_are_seen():
    assert seen(torch.device("cpu"), lambda: torch.tensor([True, True]))
    assert not seen(torch.device("cpu"), lambda: torch.tensor([True, False]))


def test_flags_of_other_devices_are_not_even_computed():
    assert not seen(torch.device("meta"), lambda: pytest.fail("a launch for nothing"))
