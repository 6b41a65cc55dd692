"""Closed forms solve their equations, and do what the paper says of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import solve_continuous_lyapunov
from torch import Tensor

from psgd import closed_form
from psgd.closed_form import c1, c2, c3, covariances

from .test_criteria import random_hessian


def sample(seed: int, n: int = 5, count: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtheta = torch.randn(count, n, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, n, generator=generator, dtype=torch.float64)
    return dtheta, dtheta @ random_hessian(n, 1.0, True, seed) + 0.3 * noise


seeds = given(st.integers(0, 10_000))


@settings(max_examples=30)
@seeds
def test_equations_of_the_paper(seed):
    R_theta, R_g, R_theta_g = covariances(*sample(seed))
    cross = R_theta_g + R_theta_g.mT
    inverse = torch.linalg.inv(c1(R_theta, R_g, R_theta_g))
    torch.testing.assert_close(R_theta @ inverse + inverse @ R_theta, cross)
    P = c2(R_theta, R_g, R_theta_g)
    torch.testing.assert_close(P @ R_g + R_g @ P, cross)
    P = c3(R_theta, R_g, R_theta_g)
    torch.testing.assert_close(P @ R_g @ P, R_theta)
    torch.testing.assert_close(P, P.mT)
    assert torch.linalg.eigvalsh(P).min() > 0
    assert torch.equal(P, c3(R_theta, R_g))


@settings(max_examples=10)
@seeds
def test_lyapunov_solutions_are_those_of_scipy(seed):
    R_theta, R_g, R_theta_g = covariances(*sample(seed))
    cross = (R_theta_g + R_theta_g.mT).numpy()
    theirs = torch.from_numpy(solve_continuous_lyapunov(R_g.numpy(), cross))
    torch.testing.assert_close(c2(R_theta, R_g, R_theta_g), theirs)
    theirs = torch.linalg.inv(torch.from_numpy(solve_continuous_lyapunov(R_theta.numpy(), cross)))
    torch.testing.assert_close(c1(R_theta, R_g, R_theta_g), theirs)


@settings(max_examples=20)
@seeds
def test_closed_forms_minimise_their_criteria(seed):
    """On the samples themselves, by autograd: the gradient of each criterion with respect to P vanishes."""
    dtheta, dgrad = sample(seed)
    moments = covariances(dtheta, dgrad)
    for name, cost in {
        "c1": lambda P: (dgrad - dtheta @ torch.linalg.inv(P)).square().sum(1).mean(),
        "c2": lambda P: (dgrad @ P - dtheta).square().sum(1).mean(),
        "c3": lambda P: ((dgrad @ P) * dgrad).sum(1).mean() + ((dtheta @ torch.linalg.inv(P)) * dtheta).sum(1).mean(),
    }.items():
        P = getattr(closed_form, name)(*moments).requires_grad_()
        (gradient,) = torch.autograd.grad(cost(P), P)
        (beside,) = torch.autograd.grad(cost(P * 1.1), P)
        symmetric = gradient + gradient.mT
        assert torch.linalg.matrix_norm(symmetric) < 1e-6 * torch.linalg.matrix_norm(beside)


@pytest.mark.parametrize("definite", [True, False])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_white_noise_formulas(definite, noise):
    """Section IV: P1 = H⁻¹, P2 = Σ λ/(λ²+ρ²) uuᵀ, P3 = Σ 1/√(λ²+ρ²) uuᵀ, with ρ² the ratio of the variances."""
    H = random_hessian(6, 1.0, definite, 4)
    values, U = torch.linalg.eigh(H)
    eye = torch.eye(6, dtype=torch.float64)
    moments = (2 * eye, 2 * (H @ H + noise**2 * eye), 2 * H)
    torch.testing.assert_close(c1(*moments), torch.linalg.inv(H))
    torch.testing.assert_close(c2(*moments), U * (values / (values**2 + noise**2)) @ U.mT)
    torch.testing.assert_close(c3(*moments), U * (values**2 + noise**2).rsqrt() @ U.mT)


def test_covariances_are_means_of_outer_products():
    dtheta, dgrad = sample(0, n=3, count=4)
    for ours, x, y in zip(covariances(dtheta, dgrad), (dtheta, dgrad, dtheta), (dtheta, dgrad, dgrad), strict=True):
        torch.testing.assert_close(ours, torch.stack([torch.outer(a, b) for a, b in zip(x, y, strict=True)]).mean(0))


def test_covariances_want_samples_in_rows():
    with pytest.raises(ValueError, match=r"dtheta of shape \(3,\).*two matrices of one shape"):
        covariances(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"dgrad of shape \(3, 4\)"):
        covariances(torch.ones(4, 3), torch.ones(3, 4))
