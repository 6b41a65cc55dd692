"""The factor of the learning rate: what it is derived from, and what it leads to."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psgd
from psgd import PSGD, Dense, Diagonal, Kronecker, Whitening
from psgd.engine import pace

YES = torch.tensor(True)


def adapted(factor: float, slope: float, square: float, ok: Tensor = YES) -> float:
    return float(pace.adapted(torch.tensor([factor]), torch.tensor([slope]), torch.tensor([square]), 0.1, ok))


def test_the_factor_follows_the_slope_after_the_last_step():
    assert adapted(3.0, 0.5, 1.0) == pytest.approx(3 * math.exp(0.05))
    assert adapted(3.0, -1.0, 4.0) == pytest.approx(3 * math.exp(-0.025 * pace.CAUTION))
    assert adapted(3.0, 1e6, 1.0) == pytest.approx(3 * math.exp(0.1))
    assert adapted(3.0, -1e6, 1.0) == pytest.approx(3 * math.exp(-0.1 * pace.CAUTION))


def test_noise_alone_does_not_make_steps_longer():
    generator = torch.Generator().manual_seed(0)
    factor, factors = torch.ones(100), []
    for _ in range(500):
        slope = torch.randn(100, generator=generator)
        factor = pace.adapted(factor, slope, torch.ones(100), 0.1, YES)
        factors.append(factor)
    assert torch.stack(factors).mean() < 1.2


def test_the_factor_is_one_at_first_and_never_smaller():
    assert adapted(0.0, 0.0, 1.0) == 1
    assert adapted(0.0, 1.0, 1.0) == pytest.approx(math.exp(0.1))
    assert adapted(1.0, -1.0, 1.0) == 1
    assert adapted(pace.MOST, 1.0, 1.0) == pace.MOST


@pytest.mark.parametrize(("slope", "square"), [(0.0, 0.0), (1.0, 0.0), (math.nan, 1.0), (math.inf, math.inf)])
def test_what_says_nothing_leaves_the_factor(slope, square):
    assert adapted(3.0, slope, square) == 3


def test_a_step_that_is_not_taken_leaves_the_factor():
    assert adapted(3.0, 1.0, 1.0, ~YES) == 3


def quadratic(n: int = 6, condition: float = 100.0) -> Tensor:
    rotation = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    return (rotation * torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)) @ rotation.mT


def descend(optimizer: PSGD, theta: Tensor, H: Tensor, steps: int) -> float:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * theta @ H @ theta
        loss.backward()
        return loss.detach()

    for _ in range(steps):
        optimizer.step(closure)
    return float(closure())


OPTIONS: list[dict[str, Any]] = [
    {"preconditioner": Dense()},
    {"preconditioner": Diagonal()},
    {"preconditioner": Kronecker()},
    {"update_every": 2},
    {"maximize": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_slope_is_that_of_the_new_gradient_along_the_last_step(options: dict[str, Any]):
    n, beta = 6, 0.8
    H = quadratic(n)
    sign = -1 if options.get("maximize") else 1
    theta = torch.ones(n, dtype=torch.float64, requires_grad=True)
    settings = {"lr": 0.01, "momentum": beta, "adapt_lr": 0.1, **options}
    optimizer = PSGD([theta], **settings)
    m, factor = torch.zeros(n, dtype=torch.float64), 1.0
    for k in range(5):
        g = sign * H @ theta.detach()
        descend(optimizer, theta, sign * H, 1)
        group = optimizer.stacks[0].group
        new = beta * m + (1 - beta) * g
        if k:
            P = torch.stack([group.precondition(e[None])[0] for e in torch.eye(n, dtype=torch.float64)])
            slope = float(g @ P @ m) / (1 - beta**k) / (float(new @ P @ new) / (1 - beta ** (k + 1)) ** 2)
            factor = max(1.0, factor * math.exp(0.1 * min(max(slope, -1), 1)))
        m = new
        assert float(optimizer.state[theta]["lr_factor"]) == pytest.approx(factor, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-4, 1e-2, 1.0])
def test_a_learning_rate_that_is_far_too_small_is_found(lr):
    """Also if it is right already; without the factor it would hardly move."""
    torch.manual_seed(0)
    H, losses = quadratic(), {}
    for adapt_lr in (0.0, 0.1):
        theta = torch.ones(6, dtype=torch.float64, requires_grad=True)
        losses[adapt_lr] = descend(PSGD([theta], lr=lr, adapt_lr=adapt_lr), theta, H, 300)
    assert losses[0.1] < 1e-6
    assert (losses[0.0] > 1e-3) == (lr < 1)


@pytest.mark.parametrize("lr", [1e-6, 10.0])
def test_whitening_adapts_too(lr):
    """``P`` before its update whitens the average, and ``P`` after it tells the slope."""
    torch.manual_seed(0)
    H = quadratic()
    theta = torch.ones(6, dtype=torch.float64, requires_grad=True)
    optimizer = PSGD([theta], lr=lr, probe=Whitening(), adapt_lr=0.1)
    descend(optimizer, theta, H, 50)
    factor = float(optimizer.state[theta]["lr_factor"])
    assert factor > 20 if lr < 1 else factor < 2


def test_the_factor_multiplies_steps_after_they_are_limited():
    """``max_norm`` limits steps in units of the learning rate, whichever part of that is the factor."""
    moved = {}
    for lr, factor in ((0.1, 1.0), (0.01, 10.0)):
        theta = torch.ones(6, dtype=torch.float64, requires_grad=True)
        optimizer = PSGD([theta], lr=lr, adapt_lr=1e-9, max_norm=0.5)
        H = torch.eye(6, dtype=torch.float64)
        descend(optimizer, theta, H, 1)
        optimizer.state[theta]["lr_factor"].fill_(factor)
        start = theta.detach().clone()
        descend(optimizer, theta, H, 1)
        moved[lr] = float((theta.detach() - start).norm())
    assert moved[0.1] == pytest.approx(0.05)
    assert moved[0.01] == pytest.approx(0.05)


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_the_factor_waits_while_the_learning_rate_is_zero(zero):
    """Otherwise it would grow to its limit, and the first step afterwards would be a million times too long."""
    torch.manual_seed(0)
    H = quadratic()
    theta = torch.ones(6, dtype=torch.float64, requires_grad=True)
    optimizer = PSGD([theta], lr=0.5, adapt_lr=0.1)
    start = descend(optimizer, theta, H, 0)
    optimizer.param_groups[0]["lr"] = zero
    descend(optimizer, theta, H, 100)
    assert float(optimizer.state[theta]["lr_factor"]) == 1
    optimizer.param_groups[0]["lr"] = 0.5
    assert max(descend(optimizer, theta, H, 1) for _ in range(50)) < 10 * start


def test_a_run_resumes_with_its_factor():
    H = quadratic()
    theta = torch.ones(6, dtype=torch.float64, requires_grad=True)
    optimizer = PSGD([theta], lr=1e-3, adapt_lr=0.1)
    descend(optimizer, theta, H, 20)
    again = theta.detach().clone().requires_grad_()
    resumed = PSGD([again], lr=1e-3, adapt_lr=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    descend(optimizer, theta, H, 20)
    descend(resumed, again, H, 20)
    assert torch.equal(theta, again)
    assert float(resumed.state[again]["lr_factor"]) > 2


def test_it_needs_momentum():
    theta = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"adapt_lr=0.1: PSGD wants momentum with it"):
        PSGD([theta], momentum=0.0, adapt_lr=0.1)
    assert psgd.newton(nn.Linear(2, 2), momentum=0.0).defaults["adapt_lr"] == 0


def test_only_newton_adapts_by_default():
    model = nn.Linear(2, 2)
    assert psgd.newton(model).defaults["adapt_lr"] == 0.1
    assert psgd.newton(model, adapt_lr=0.0).defaults["adapt_lr"] == 0
    assert psgd.whiten(model).defaults["adapt_lr"] == 0
    assert PSGD(model.parameters()).defaults["adapt_lr"] == 0
