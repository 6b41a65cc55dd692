"""What all probes have in common."""

from __future__ import annotations

import pytest
import torch

from psgd import FiniteDifference, HessianVector, Whitening, c1, c2, c3
from psgd.probes import Probe

every_probe = pytest.mark.parametrize("kind", [FiniteDifference, HessianVector, Whitening])


@every_probe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_default_damping_lies_between_what_rounding_hides(kind: type[Probe], dtype: torch.dtype):
    """In the middle, on a scale of logarithms, of what it hides from a product and from a difference."""
    eps = torch.finfo(dtype).eps
    assert kind().relative_damping(dtype) == pytest.approx((eps * eps**0.5) ** 0.5)
    assert kind(damping=0.25).relative_damping(dtype) == 0.25
    assert kind(damping=0.0).relative_damping(dtype) == 0.0


@every_probe
def test_what_needs_a_solve_or_random_numbers_is_not_recorded(kind: type[Probe]):
    """The host waits for a solve; and a recording would repeat the random numbers of its first step."""
    recorded = [criterion for criterion in (c1, c2, c3) if kind().recordable(criterion)]
    assert recorded == ([c3] if kind is Whitening else [c2, c3])
