"""``P`` of a minimisation without noise."""

from __future__ import annotations

import pytest
import torch

from psgd import Dense, Diagonal, c3
from psgd.minimizing.metric import Metric


@pytest.mark.parametrize("curvature", [1e-3, 1.0, 1e3])
def test_p_starts_as_the_inverse_of_the_first_curvature(curvature: float):
    s, v = torch.randn(2, 5, dtype=torch.float64)
    metric = Metric(Dense(), (5,), s, c3)
    metric.fit(s, curvature * s)
    torch.testing.assert_close(metric.precondition(v), v / curvature)


@pytest.mark.parametrize("precond_lr", [1e-6, 1e-3, 0.1])
def test_q_moves_by_no_more_than_its_largest_step(precond_lr: float):
    s = torch.ones(3, dtype=torch.float64)
    metric = Metric(Diagonal(), (3,), s, c3, precond_lr)
    metric.fit(s, torch.tensor([1.0, 100.0, 0.01], dtype=torch.float64))
    assert (metric.group.dense()[0].diagonal() - 1).abs().max().item() == pytest.approx(precond_lr)
