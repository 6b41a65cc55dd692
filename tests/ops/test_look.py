"""The host sees flags of a CPU, and never those of a device that it would have to wait for."""

from __future__ import annotations

import torch

from psgd.ops.look import seen


def test_flags_of_a_cpu_are_seen():
    assert seen(torch.tensor([True, True]))
    assert not seen(torch.tensor([True, False]))


def test_flags_of_other_devices_are_not_looked_at():
    assert not seen(torch.ones(2, dtype=torch.bool, device="meta"))
