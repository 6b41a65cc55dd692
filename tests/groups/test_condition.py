"""The condition of factors; ``monitor/test_monitor.py`` has those of all structures."""

from __future__ import annotations

import torch

from psgd.groups import condition as reading
from psgd.groups.near_symmetric import NearSymmetric


def test_a_rotation_does_not_change_the_condition(monkeypatch):
    """Of an estimate too: the singular values of ``Q`` count, not its eigenvalues."""
    monkeypatch.setattr(reading, "EXACT", 4)
    values = torch.tensor([100.0, *[1.0] * 10, 0.01], dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(3, 12, 12, dtype=torch.float64))[0]
    found = reading.condition(NearSymmetric(rotation * values))
    torch.testing.assert_close(found, torch.full((3,), 1e4, dtype=torch.float64))
