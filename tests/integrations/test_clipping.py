"""What clipping does to the step and to what ``Q`` is fitted to, beside ``max_norm`` and ``max_rms``."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from psgd import PSGD, Dense, FiniteDifference, Whitening
from psgd.probes.noise import Noise
from psgd.probes.restore import Gradients

from ..cases import batch, small_model


def quadratic(n: int = 20) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return A @ A.mT / n + 0.05 * torch.eye(n, dtype=torch.float64)


def descend(clip: float | None, max_norm: float | None, steps: int = 250, **options) -> float:
    """The loss after some steps on a quadratic, over that at the start."""
    H = quadratic()
    theta = torch.full((20,), 5.0, dtype=torch.float64, requires_grad=True)
    optimizer = PSGD([theta], lr=0.5, preconditioner=Dense(), precond_lr=0.1, max_norm=max_norm, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * theta @ H @ theta
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([theta], clip)
        return loss

    losses = [optimizer.step(closure).item() for _ in range(steps)]
    return losses[-1] / losses[0]


def pair(clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, and the pair that is measured, with clipping in the closure."""
    H = quadratic()
    theta = torch.full((20,), 5.0, dtype=torch.float64, requires_grad=True)

    def closure() -> Tensor:
        theta.grad = None
        loss = 0.5 * theta @ H @ theta
        loss.backward()
        nn.utils.clip_grad_norm_([theta], clip)
        return loss

    noise = Noise(0)
    with torch.no_grad():
        found = FiniteDifference()(closure, [theta], [0], lambda i: noise(theta, 0, i), Gradients([theta]))
    dtheta, dgrad = found.pairs[0]
    return (H @ theta).detach(), dtheta, dgrad


def test_clipping_in_the_closure_hides_the_curvature_along_the_gradient():
    """Both gradients are of one length then, so their difference has no part along them."""
    g, dtheta, dgrad = pair(clip=1.0)
    along = g / g.norm()
    true = quadratic() @ dtheta
    assert (dgrad @ along).abs() < 1e-5 * dgrad.norm()
    # Elsewhere it is the curvature, times that by which the gradient was shortened.
    torch.testing.assert_close(dgrad, (true - along * (along @ true)) / g.norm(), rtol=1e-4, atol=1e-12)
    g, dtheta, dgrad = pair(clip=1e6)
    torch.testing.assert_close(dgrad, true, rtol=1e-5, atol=1e-12)


def test_limits_for_finite_differences():
    assert descend(clip=None, max_norm=1.0) < 1e-8
    # Clipped gradients hide curvature; what is left of it is enough for steps that are averaged, and limited.
    assert descend(clip=0.1, max_norm=None) < 1e-8
    paper = {"momentum": 0.0, "init": "identity", "clip_outliers": math.inf, "clip_steps": math.inf}
    assert descend(clip=0.1, max_norm=None, **paper) > 1  # more than at the start


def test_clipping_that_does_not_clip_changes_no_bit():
    assert descend(clip=1e6, max_norm=1.0, steps=50) == descend(clip=None, max_norm=1.0, steps=50)


def test_clipping_keeps_an_outlier_from_whitened_steps():
    """One gradient of a size of its own is most of the average, and so of the steps, for a while."""

    def steps_along_outlier(clip: bool) -> float:
        generator = torch.Generator().manual_seed(0)
        theta = torch.zeros(6, 6, requires_grad=True)
        optimizer = PSGD([theta], lr=1.0, probe=Whitening(), clip_outliers=math.inf)
        outlier = torch.randn(6, 6, generator=generator) * 1e4
        cosines = []
        for step in range(40):
            theta.grad = outlier.clone() if step == 30 else torch.randn(6, 6, generator=generator)
            if clip:
                nn.utils.clip_grad_norm_([theta], 6.0)
            before = theta.detach().clone()
            optimizer.step()
            moved = before - theta.detach()
            cosines.append(float((moved * outlier).sum() / moved.norm() / outlier.norm()))
        return sum(cosines[31:36]) / 5

    assert steps_along_outlier(clip=False) > 0.6
    assert steps_along_outlier(clip=True) < 0.4


@pytest.mark.parametrize("limit", [{"max_norm": 0.3}, {"max_rms": 0.05}], ids=str)
def test_limits_are_kept_whatever_the_clipping(limit):
    model = small_model(torch.float64)
    optimizer = PSGD(model.parameters(), lr=1.0, probe=Whitening(), **limit)
    for step in range(10):
        x, y = batch(step, torch.float64)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]
        if "max_norm" in limit:
            assert torch.cat([m.flatten() for m in moved]).norm() <= 0.3 * (1 + 1e-9)
        else:
            assert max(m.square().mean().sqrt() for m in moved) <= 0.05 * (1 + 1e-9)
