"""The schedule of a minimisation with noise."""

from __future__ import annotations

import torch

from psgd import minimize


def test_steps_are_long_for_half_of_the_time_and_then_ever_shorter():
    """On a function without curvature ``P`` stays the identity, so that every step is ``lr`` times the gradient."""
    points = [torch.tensor([3.0, 4.0], dtype=torch.float64)]
    result = minimize(
        lambda x: x.sum(), points[0], stochastic=True, lr=0.1, maxiter=20, callback=lambda x: points.append(x.clone())
    )
    right = [0.1] * 11 + [0.1 * (20 - k) / 10 for k in range(11, 20)]
    lengths = (torch.stack(points[:-1]) - torch.stack(points[1:]))[:, 0]
    torch.testing.assert_close(lengths, torch.tensor(right, dtype=torch.float64))
    torch.testing.assert_close(result.x, torch.stack(points[16:]).mean(0))  # the mean over the last quarter
