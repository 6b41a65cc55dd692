"""Whitening: which ``P`` a step uses, and what an update is damped by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from psgd import PSGD, Kronecker, Whitening, c3
from psgd.groups.inverse_free import Chores
from psgd.probes import Average, Measured


def whitener(Q: dict[str, Tensor]) -> list[Tensor]:
    """``P`` of both axes."""
    return [Q[name].mT @ Q[name] for name in ("Q0_root", "Q1_root")]


@pytest.mark.parametrize("of_average", [True, False])
def test_a_step_uses_p_of_before_the_update_of_the_average_and_else_that_of_after(of_average: bool):
    generator = torch.Generator().manual_seed(0)
    theta = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    optimizer = PSGD([theta], lr=0.5, probe=Whitening(of_average), max_rms=float("inf"), init="identity")
    for _ in range(5):
        start, before = theta.detach().clone(), whitener(optimizer.state[theta])
        theta.grad = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        optimizer.step()
        state, after = optimizer.state[theta], whitener(optimizer.state[theta])
        right, wrong = (before, after) if of_average else (after, before)
        m = state["momentum"] / state["momentum_weight"]
        torch.testing.assert_close(theta.detach(), start - 0.5 * right[0] @ m @ right[1])
        assert not torch.allclose(theta.detach(), start - 0.5 * wrong[0] @ m @ wrong[1], rtol=1e-2)


def fitted(damping: float, chores: float) -> Tensor:
    """``Q`` after one update, which has a share of the damping of its probe."""
    group = Kronecker().init((4,), dtype=torch.float64, device="cpu")
    g = torch.tensor([[1.0, 2.0, 3.0, 0.0]], dtype=torch.float64)
    measured = Measured(
        average=Average(lambda: [g], None, averaged=False),
        gradients=lambda: Average(lambda: [g], None, averaged=False),
        pairs=iter(()),
        noise=iter(()),
        sign=1.0,
        chores=Chores(tidy=True, damping=chores),
        outs=lambda: [None],
        support=lambda: [None],
    )
    Whitening(damping=damping).fit_(Kronecker().together([group]), measured, c3, 0.3, torch.tensor(True))
    return group.dense()


def test_the_damping_of_an_update_is_that_of_its_probe_times_that_of_its_chores():
    assert torch.equal(fitted(0.5, 0.0), fitted(0.0, 1.0))
    assert torch.equal(fitted(0.25, 2.0), fitted(0.5, 1.0))
    assert not torch.equal(fitted(0.5, 1.0), fitted(0.0, 1.0))
