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


def singular(of: str, count: int = 50) -> tuple[Tensor, Tensor]:
    """Samples in five dimensions of which one never changes: ``θ``, the gradient, or both (fewer samples than that)."""
    generator = torch.Generator().manual_seed(3)
    dtheta = torch.randn(4 if of == "both" else count, 5, generator=generator, dtype=torch.float64)
    dgrad = dtheta @ random_hessian(5, 1.0, True, 2) + 0.1 * torch.randn_like(dtheta)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64))[0]
    flat = turn * torch.tensor([0.0, 1, 1, 1, 1], dtype=torch.float64) @ turn.mT
    return (dtheta @ flat if of == "theta" else dtheta), (dgrad @ flat if of == "g" else dgrad)


@pytest.mark.parametrize("of", ["theta", "g", "both"])
def test_singular_covariances_have_a_limit_or_an_error(of):
    moments = covariances(*singular(of))
    if of == "g":
        with pytest.raises(ValueError, match="R_g: it is singular to working precision: gradients never change"):
            c3(*moments)
    else:
        with pytest.raises(ValueError, match="R_theta: it is singular to working precision: θ never changes"):
            c1(*moments)
    eye = torch.eye(5, dtype=torch.float64)
    if of == "theta":  # the limit of samples that change θ a little in every direction
        P = c3(*moments)
        torch.testing.assert_close(P @ moments[1] @ P, moments[0])
        torch.testing.assert_close(P, c3(moments[0] + 1e-12 * eye, moments[1]), rtol=1e-4, atol=1e-4)
        assert torch.linalg.eigvalsh(P)[0].abs() < 1e-14 < 0.01 < torch.linalg.eigvalsh(P)[1]
    P = c2(*moments)
    torch.testing.assert_close(P @ moments[1] + moments[1] @ P, moments[2] + moments[2].mT)
    torch.testing.assert_close(P, c2(moments[0], moments[1] + 1e-9 * eye, moments[2]), rtol=1e-4, atol=1e-4)
    dtheta, dgrad = singular(of)
    cost = (dgrad @ P - dtheta).square().sum()
    for other in (eye, torch.ones_like(eye)):  # the smallest of all that are best
        worse = P + 0.1 * other
        assert (dgrad @ worse - dtheta).square().sum() >= cost


def test_a_hessian_without_curvature_somewhere():
    dtheta = sample(0)[0]
    H = torch.diag(torch.tensor([1.0, 2, 3, 4, 0], dtype=torch.float64))
    moments = covariances(dtheta, dtheta @ H)
    with pytest.raises(ValueError, match=r"R_theta_g: it is singular.*there is no curvature.*P would be infinite"):
        c1(*moments)
    with pytest.raises(ValueError, match="R_g: it is singular"):
        c3(*moments)
    moments = (torch.eye(5, dtype=torch.float64), H @ H, H)
    torch.testing.assert_close(c2(*moments), torch.diag(torch.tensor([1, 1 / 2, 1 / 3, 1 / 4, 0.0]).double()))


@pytest.mark.parametrize("form", [c1, c2, c3], ids=lambda f: f.__name__)
def test_what_is_no_covariance(form):
    eye = torch.eye(3, dtype=torch.float64)
    for bad, message in [
        (eye * torch.nan, "it is not finite"),
        (-eye, "not symmetric and positive semidefinite"),
        (eye + torch.ones(3, 3).triu(1), "not symmetric and positive semidefinite"),
        (torch.ones(3, 2, dtype=torch.float64), r"of shape \(3, 2\): closed forms want a square matrix"),
    ]:
        with pytest.raises(ValueError, match=message):
            form(bad, bad, eye)
    with pytest.raises(ValueError, match="R_theta_g: nonzero where the other covariance is zero"):
        c2(eye, 0 * eye, eye)
