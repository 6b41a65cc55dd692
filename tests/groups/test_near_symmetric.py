"""The estimate of a norm, and the turn back to symmetry."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from psgd.groups.near_symmetric import norm_, turn_

from .test_inverse_free import EXACT, Case, asymmetry, stuck

ALL = torch.tensor([True, True, True])


def turned_away(angle: float, n: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    B = torch.randn(3, n, n, generator=generator, dtype=torch.float64)
    return torch.matrix_exp(angle * (B - B.mT)) @ Case((n,)).group(batch=3, spread=0.8).factors[0].dense()


@pytest.mark.parametrize("m", [2, 4, 9, 100])
def test_a_norm_is_never_overestimated_and_may_be_missed(m: int):
    a = stuck(m)[0]
    norm, square, _ = norm_((a @ a.mT)[None])
    torch.testing.assert_close(norm.item(), 1.01 * m**0.5)  # the norm is m
    torch.testing.assert_close(square.item(), 1.01**2 * m + m**2)
    S = torch.randn(5, m, m)
    S = S @ S.mT
    norm, square, _ = norm_(S)
    exact = torch.linalg.matrix_norm(S, 2)
    assert torch.all((norm <= exact * (1 + 1e-5)) & (norm >= 0.7 * exact))
    torch.testing.assert_close(square, S.square().sum((1, 2)))
    assert torch.equal(norm_(S.diagonal(dim1=1, dim2=2))[0], S.diagonal(dim1=1, dim2=2).amax(1))


@pytest.mark.parametrize("angle", [1e-1, 1e-2, 1e-4])
def test_a_turn_keeps_p_to_second_order_and_reduces_asymmetry(angle: float):
    Q = turned_away(angle)
    P, before = Q.mT @ Q, asymmetry(Q)
    turn_(Q, ALL)
    assert torch.all(asymmetry(Q) < 0.5 * before)
    assert torch.all(torch.linalg.matrix_norm(Q.mT @ Q - P) < 100 * angle**2)


@pytest.mark.parametrize("angle", [0.1, 1.0, 1.5, 1.57])
def test_a_turn_is_never_far(angle: float):
    """``I + t R`` with ``‖t R‖ ≤ ½`` stretches ``P`` by at most a quarter, also where ``Q`` is nearly antisymmetric."""
    cos, sin = math.cos(angle), math.sin(angle)
    rotation = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    Q = torch.block_diag(rotation, rotation, torch.eye(1, dtype=torch.float64)).expand(3, -1, -1).clone()
    before = asymmetry(Q)
    turn_(Q, ALL)
    stretched = torch.linalg.eigvalsh(Q.mT @ Q)
    assert torch.all(stretched >= 1 - 1e-12)
    assert torch.all(stretched <= 1.25 + 1e-12)
    assert torch.all(asymmetry(Q) < before)


@pytest.mark.parametrize("angle", [1e-1, 1e-3])
def test_many_turns_end_at_the_symmetric_root(angle: float):
    Q = turned_away(angle)
    P = Q.mT @ Q
    for _ in range(150):
        turn_(Q, ALL)
    eigenvalues, U = torch.linalg.eigh(Q.mT @ Q)
    torch.testing.assert_close(Q, (U * eigenvalues[:, None].sqrt()) @ U.mT, **EXACT)
    assert torch.all(torch.linalg.matrix_norm(Q.mT @ Q - P) < 100 * angle**2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_symmetric_is_not_turned(dtype: torch.dtype):
    Q = turned_away(0.0).to(dtype)
    Q = Q.triu() + Q.triu(1).mT
    before = Q.clone()
    turn_(Q, ALL)
    assert torch.equal(Q, before)


def test_only_what_is_usable_is_turned():
    Q = turned_away(0.1)
    before = Q.clone()
    turn_(Q, torch.tensor([True, False, True]))
    assert torch.equal(Q[1], before[1])
    assert torch.all(asymmetry(Q)[[0, 2]] < 0.5 * asymmetry(before)[[0, 2]])
