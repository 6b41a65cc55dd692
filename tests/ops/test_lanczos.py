"""Lanczos quadrature finds the spectrum of a symmetric map."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psgd.ops.lanczos import lanczos_quadrature
from tests.test_criteria import random_hessian


@settings(max_examples=30)
@given(n=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_lanczos_finds_the_whole_spectrum_of_a_small_matrix(n, seed):
    H = random_hessian(n, 1.0, False, seed)
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, generator=generator, dtype=torch.float64)
    nodes, weights = lanczos_quadrature(lambda v: H @ v, z, 100)
    torch.testing.assert_close(nodes, torch.linalg.eigvalsh(H), rtol=1e-6, atol=1e-7)
    assert weights.sum().item() == pytest.approx(1)
    torch.testing.assert_close((weights * nodes**3).sum(), z @ H @ H @ H @ z / (z @ z))


def test_lanczos_stays_orthogonal():
    """Every eigenvalue is found once, also where large ones leave little but rounding of the small ones."""
    eigenvalues = torch.cat([torch.arange(1, 20), torch.tensor([1e4, 1e8])]).double()
    nodes, _ = lanczos_quadrature(lambda v: eigenvalues * v, torch.ones(21, dtype=torch.float64), 100)
    torch.testing.assert_close(nodes, eigenvalues, rtol=1e-12, atol=1e-6)


def test_lanczos_stops_where_nothing_is_left():
    nodes, weights = lanczos_quadrature(lambda v: 3 * v, torch.ones(5, dtype=torch.float64), 100)
    assert nodes.tolist() == [pytest.approx(3)]
    assert weights.tolist() == [pytest.approx(1)]
