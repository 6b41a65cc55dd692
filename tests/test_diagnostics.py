"""The three properties, exact and matrix-free, and the paper's Propositions 1 and 2."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psgd import PSGD, Affine, Dense, HessianVector, Joint, Kronecker, PerTensor, diagnostics
from psgd.diagnostics import model_properties, preconditioned_eigenvalues, properties
from tests.state.test_store import bits

from .cases import STRUCTURES, batch, small_model, train
from .test_criteria import random_hessian


def random_preconditioner(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    Q = torch.randn(n, n, generator=generator, dtype=torch.float64).triu(1)
    Q.diagonal().copy_(torch.rand(n, generator=generator, dtype=torch.float64) + 0.2)
    return Q.mT @ Q


@settings(max_examples=50)
@given(n=st.integers(1, 8), seed=st.integers(0, 10_000), definite=st.booleans())
def test_proposition_1_signs_of_eigenvalues_are_kept(n, seed, definite):
    """All eigenvalues of PH are real, and as many are positive, negative and zero as of H."""
    H, P = random_hessian(n, 1.0, definite, seed), random_preconditioner(n, seed + 1)
    eigenvalues = torch.linalg.eigvals(P @ H)
    assert eigenvalues.imag.abs().max() < 1e-6 * eigenvalues.abs().max()
    symmetric = preconditioned_eigenvalues(P, H)
    torch.testing.assert_close(eigenvalues.real.sort().values, symmetric, rtol=1e-5, atol=1e-7)
    assert torch.equal(symmetric.sign(), torch.linalg.eigvalsh(H).sign())


@settings(max_examples=50)
@given(n=st.integers(1, 8), seed=st.integers(0, 10_000))
def test_proposition_2_an_ideal_preconditioner_exists(n, seed):
    """P = U |D|⁻¹ Uᵀ makes all absolute eigenvalues of PH one."""
    H = random_hessian(n, 1.0, False, seed)
    values, U = torch.linalg.eigh(H)
    P = U * (1 / values.abs()) @ U.mT
    torch.testing.assert_close(preconditioned_eigenvalues(P, H).abs(), torch.ones(n, dtype=torch.float64))


@settings(max_examples=50)
@given(n=st.integers(2, 6), seed=st.integers(0, 10_000), sign=st.sampled_from([1.0, -1.0]))
def test_proposition_2_and_it_is_unique_for_a_definite_hessian(n, seed, sign):
    """If all absolute eigenvalues of PH are one and H is definite, P is ±H⁻¹: any other P is not ideal."""
    H = sign * (random_hessian(n, 1.0, True, seed) + 0.1 * torch.eye(n, dtype=torch.float64))
    ideal = sign * torch.linalg.inv(H)
    other = ideal @ random_preconditioner(n, seed) @ ideal
    other = (other + other.mT) / 2
    distance = torch.linalg.matrix_norm(other @ H - ideal @ H)
    spread = (preconditioned_eigenvalues(other, H).abs() - 1).abs().max()
    assert (spread > 1e-6) == (distance > 1e-6)


@given(alpha=st.floats(-3, 3), beta=st.floats(-3, 3))
def test_proposition_2_but_not_for_an_indefinite_one(alpha, beta):
    """The paper's example: a family of ideal preconditioners of diag(1, −1)."""
    if abs(abs(alpha) - abs(beta)) < 0.1 or abs(alpha) < abs(beta):
        return
    a, b = alpha**2 + beta**2, 2 * alpha * beta
    P = torch.tensor([[a, b], [b, a]], dtype=torch.float64) / (alpha**2 - beta**2)
    H = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    torch.testing.assert_close(preconditioned_eigenvalues(P, H).abs(), torch.ones(2, dtype=torch.float64))


def test_exact_properties_of_known_matrices():
    H = torch.diag(torch.tensor([1.0, -4.0], dtype=torch.float64))
    plain = properties(torch.eye(2, dtype=torch.float64), H)
    assert plain.eigenvalue_spread_gain == pytest.approx(1)
    assert plain.mean_abs_eigenvalue == pytest.approx(2.5)
    assert plain.noise_suppression_gain == pytest.approx((1 + 1 / 16) / 2)
    half = properties(torch.diag(torch.tensor([1.0, 0.5], dtype=torch.float64)), H)
    assert half.eigenvalue_spread_gain == pytest.approx(2)
    assert half.mean_abs_eigenvalue == pytest.approx(1.5)
    assert half.noise_suppression_gain == pytest.approx((1 + 1 / 16) / (1 + 1 / 4))
    noise = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    gain = diagnostics.noise_suppression_gain(torch.eye(2, dtype=torch.float64), H, noise)
    assert gain.item() == pytest.approx(1)


def quadratic(structure, blocks):
    """Three tensors with one Hessian over all of them, and a preconditioner that was fitted for a while."""
    params = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in [(3, 2), (3,), (2,)]]
    n = sum(p.numel() for p in params)
    H = random_hessian(n, 1.0, False, 3) + torch.diag(torch.arange(1.0, n + 1, dtype=torch.float64))
    groups = [{"params": params[:2]}, {"params": params[2:]}] if isinstance(blocks, Affine) else params
    optimizer = PSGD(groups, lr=0.0, preconditioner=structure, blocks=blocks, probe=HessianVector())

    def closure():
        theta = torch.cat([p.flatten() for p in params])
        return theta @ H @ theta / 2

    for _ in range(60):
        optimizer.step(closure)
    return params, H, optimizer, closure


def dense_preconditioner(params, optimizer) -> Tensor:
    """P over the flattened parameters, column by column."""
    n = sum(p.numel() for p in params)
    columns = []
    for e in torch.eye(n, dtype=torch.float64):
        parts = e.split([p.numel() for p in params])
        given_ = {i: part.reshape(p.shape) for i, (p, part) in enumerate(zip(params, parts, strict=True))}
        column = {}
        for stack in optimizer.stacks:
            column.update(stack.unpack(stack.group.precondition(stack.pack(given_))))
        columns.append(torch.cat([column[i].flatten() for i in range(len(params))]))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("blocks", [PerTensor(), Joint(), Affine()], ids=str)
def test_matrix_free_equals_exact_on_small_problems(structure, blocks):
    params, H, optimizer, closure = quadratic(structure, blocks)
    exact = properties(dense_preconditioner(params, optimizer), H)
    free = model_properties(optimizer, closure, probes=100)
    assert free.eigenvalue_spread_gain == pytest.approx(exact.eigenvalue_spread_gain, rel=1e-6)
    assert free.mean_abs_eigenvalue == pytest.approx(exact.mean_abs_eigenvalue, rel=1e-6)
    assert free.noise_suppression_gain == pytest.approx(exact.noise_suppression_gain, rel=1e-6)


def fitted(n: int):
    """A quadratic problem, with a dense preconditioner that was fitted for a while."""
    theta = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    H = random_hessian(n, 1.0, True, 2) + 5 * torch.eye(n, dtype=torch.float64)
    optimizer = PSGD([theta], lr=0.0, preconditioner=Dense(), probe=HessianVector())
    for _ in range(50):
        optimizer.step(lambda: theta @ H @ theta / 2)
    Q = optimizer.state[theta]["Q0_full"]
    return optimizer, lambda: theta @ H @ theta / 2, properties(Q.mT @ Q, H)


NAMES = ["eigenvalue_spread_gain", "mean_abs_eigenvalue", "noise_suppression_gain"]


def test_matrix_free_is_exact_where_that_costs_no_more():
    """At the default of eight probes and 64 iterations up to 512 parameters."""
    optimizer, closure, exact = fitted(100)
    free = model_properties(optimizer, closure)
    for name in NAMES:
        assert getattr(free, name) == pytest.approx(getattr(exact, name), rel=1e-6)
        assert getattr(free.standard_error, name) == 0


def test_matrix_free_estimates_know_their_errors():
    """Within three standard errors, and these are neither too small nor too large to say anything."""
    optimizer, closure, exact = fitted(150)
    errors = {name: [] for name in NAMES}
    for seed in range(20):
        free = model_properties(optimizer, closure, probes=4, iterations=30, seed=seed)
        for name in NAMES:
            assert 0 < getattr(free.standard_error, name) < 0.5 * getattr(exact, name)
            errors[name].append((getattr(free, name) - getattr(exact, name)) / getattr(free.standard_error, name))
    for name in NAMES:
        inside = sum(abs(error) < 3 for error in errors[name])
        assert inside >= 17, (name, errors[name])
    assert "mean_abs_eigenvalue: " in str(free)
    assert " ± " in str(free)
    assert model_properties(optimizer, closure, probes=1, iterations=30).standard_error.mean_abs_eigenvalue == math.inf


def test_matrices_that_are_no_hessian_or_no_preconditioner():
    eye, other = torch.eye(2, dtype=torch.float64), torch.tensor([[2.0, 5.0], [0.0, 3.0]], dtype=torch.float64)
    for P, H, message in [
        (eye, other, "H: it is not symmetric"),
        (other, eye, "P: it is not symmetric"),
        (-eye, eye, "P: it is not positive definite"),
        (eye, torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64)), "H: it is singular"),
        (eye, torch.nan * eye, "H: .* not finite"),
        (eye, torch.ones(2, dtype=torch.float64), r"H of shape \(2,\): diagnostics want a square matrix"),
    ]:
        with pytest.raises(ValueError, match=message):
            properties(P, H)
    nearly = eye + torch.tensor([[0.0, 1e-12], [0.0, 0.0]], dtype=torch.float64)  # as rounding leaves it
    properties(eye, torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64)) @ nearly)


def test_frozen_parameters_are_left_out():
    params, H, optimizer, closure = quadratic(Dense(), PerTensor())
    params[0].requires_grad_(False)
    rest = slice(6, 11)
    exact = properties(dense_preconditioner(params, optimizer)[rest, rest], H[rest, rest])
    free = model_properties(optimizer, closure, probes=100)
    assert free.noise_suppression_gain == pytest.approx(exact.noise_suppression_gain, rel=1e-6)
    assert free.mean_abs_eigenvalue == pytest.approx(exact.mean_abs_eigenvalue, rel=1e-6)
    params, H, optimizer, closure = quadratic(Dense(), Joint())
    params[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"a block of shape \(11,\) has trainable and frozen parameters"):
        model_properties(optimizer, closure)


def test_wrong_questions_about_a_model():
    params, _, optimizer, closure = quadratic(Dense(), PerTensor())
    for options, message in [
        ({"probes": 0}, "probes=0: model_properties wants"),
        ({"iterations": 1.5}, "iterations=1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            model_properties(optimizer, closure, **options)

    def backward():
        loss = closure()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match=r"it called backward\(\); model_properties wants"):
        model_properties(optimizer, backward)
    assert all(p.grad is None for p in params)


def test_looking_at_a_model_touches_nothing():
    model = small_model(torch.float64)
    optimizer = PSGD(model.parameters(), lr=0.05, preconditioner=Kronecker())
    train(model, optimizer, 0, 20)
    x, y = batch(0, torch.float64)
    before, grads, random = bits(model, optimizer), [p.grad for p in model.parameters()], torch.get_rng_state()
    found = model_properties(optimizer, lambda: ((model(x) - y) ** 2).mean(), probes=3, iterations=20)
    assert found.mean_abs_eigenvalue > 0
    assert bits(model, optimizer) == before
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(random, torch.get_rng_state())
    again = model_properties(optimizer, lambda: ((model(x) - y) ** 2).mean(), probes=3, iterations=20)
    assert found == again
