"""The pair (x, y) says the same about S as S itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psgd.tangent import BLOCK_ROWS, DiagonalTangent, Tangent, fold, unfold

SHAPES = [(1, 1), (5, 1), (5, 3), (3, 7), (130, 1), (290, 2), (530, 2), (300, 40), (150, 200)]


def pair(n: int, k: int, batch: int = 2, seed: int = 0) -> Tangent:
    generator = torch.Generator().manual_seed(seed)
    return Tangent(*torch.randn(2, batch, n, k, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_norms_and_diagonal_are_those_of_the_matrix(n, k):
    tangent = pair(n, k)
    S = tangent.x @ tangent.y.mT + tangent.y @ tangent.x.mT
    torch.testing.assert_close(tangent.matrix(), S)
    torch.testing.assert_close(tangent.diagonal(), S.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(tangent.max_abs(), S.abs().amax((1, 2)))
    torch.testing.assert_close(tangent.max_diag(), S.diagonal(dim1=1, dim2=2).abs().amax(1))
    torch.testing.assert_close(tangent.upper(n // 2, n), S[:, n // 2 :, n // 2 :])
    for start in range(0, n, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, n)
        torch.testing.assert_close(tangent.upper(start, stop), S[:, start:stop, start:])
    exact = torch.linalg.matrix_norm(S, 2)
    if k == 1:
        torch.testing.assert_close(tangent.spectral(), exact)
    assert torch.all(tangent.spectral() <= exact * (1 + 1e-12))


@settings(max_examples=60)
@given(
    n=st.integers(65, 300),
    seed=st.integers(0, 2**31),
    tail=st.floats(0.0, 3.0),
    alike=st.sampled_from([0.0, 0.9, 1.0]),
    crossed=st.booleans(),
)
def test_the_largest_element_of_long_vectors_is_exact(n, seed, tail, alike, crossed):
    """Also where it is not among the longest pairs: with x and y apart, all products of long ones may vanish."""
    x, y = pair(n, 1, batch=1, seed=seed).x, pair(n, 1, batch=1, seed=seed + 1).y
    x, y = x * (tail * y).exp(), alike * x + (1 - alike) * y
    if crossed:  # the longest 100 have x alone, the others y alone
        is_long = torch.arange(n)[None, :, None] < min(100, n - 1)
        x, y = torch.where(is_long, x.sign() * (2 + x.abs()), 0), torch.where(is_long, 0, y.sign())
    tangent = Tangent(x, y)
    torch.testing.assert_close(tangent.max_abs(), tangent.matrix().abs().amax((1, 2)), rtol=1e-12, atol=0)


@settings(max_examples=60)
@given(
    n=st.integers(2, 40),
    k=st.integers(2, 40),
    seed=st.integers(0, 2**31),
    decay=st.floats(0.0, 3.0),
    alike=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_spectral_estimate_is_safe(n, k, seed, decay, alike):
    """Between half the norm and the norm, also where columns differ much in size or x and y are much alike."""
    tangent = pair(n, k, batch=1, seed=seed)
    sizes = torch.arange(1, k + 1, dtype=torch.float64) ** -decay
    x = tangent.x * sizes
    tangent = Tangent(x, alike * x + (1 - alike) * tangent.y * sizes)
    exact = torch.linalg.matrix_norm(tangent.matrix(), 2)
    estimate = tangent.spectral()
    assert torch.all(estimate <= exact * (1 + 1e-9))
    assert torch.all(estimate >= 0.5 * exact)
    assert torch.all(estimate >= tangent.max_diag() * (1 - 1e-12))


@pytest.mark.parametrize("size", [1e-42, 1e-20, 1.0, 1e30])
def test_unit_removes_the_scale_but_not_the_direction(size):
    x, y = torch.randn(2, 2, 3, 4)
    scaled = Tangent(x * size, y / 7)
    usable = scaled.unit_()
    assert usable.tolist() == [True, True]
    assert scaled.x.abs().amax((1, 2)).tolist() == [1.0, 1.0]
    tolerance = 1e-2 if size < 1e-40 else 1e-5  # denormal numbers have few digits
    torch.testing.assert_close(scaled.x, x / x.abs().amax((1, 2), keepdim=True), rtol=tolerance, atol=tolerance)


def test_unit_says_what_is_of_no_use():
    x = torch.ones(4, 2, 2)
    x[0] = 0
    x[1, 0, 0] = torch.nan
    x[2, 1, 1] = torch.inf
    tangent = Tangent(x, torch.ones(4, 2, 2))
    assert tangent.unit_().tolist() == [False, False, False, True]
    assert torch.equal(tangent.x[:3], torch.zeros(3, 2, 2))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_fold_undoes_unfold(dims, data):
    axis = data.draw(st.integers(0, len(dims) - 1))
    v = torch.randn(2, *dims)
    unfolded = unfold(v, axis)
    assert unfolded.shape == (2, dims[axis], v[0].numel() // dims[axis])
    assert torch.equal(fold(unfolded, axis, v.shape), v)


def test_all_norms_of_a_diagonal_are_one():
    tangent = DiagonalTangent(torch.tensor([[1.0, -3.0], [0.5, 0.25]]))
    for norm in (tangent.max_abs(), tangent.max_diag(), tangent.spectral()):
        assert norm.tolist() == [3.0, 0.5]
