"""The function as the minimiser sees it."""

from __future__ import annotations

import torch

from psgd.minimizing.objective import Objective


def test_a_sample_stays_until_the_next_one():
    """Also at a point whose value is known."""
    objective = Objective(
        lambda x, rng: (x * torch.randn(3, generator=rng, dtype=x.dtype)).sum(), torch.ones(3).double(), (), None, 0
    )
    x = objective.start
    first = objective.value(x)
    assert objective.value(x) == objective.value(x.clone()) == first
    gradient = objective.gradient(x)
    objective.next_sample()
    assert objective.value(x) != first
    assert not torch.equal(objective.gradient(x), gradient)
