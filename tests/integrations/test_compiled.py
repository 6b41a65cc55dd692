"""Compiled models, with closures and derivatives of them. ``tests/test_everyday.py`` has the ordinary loop."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from psgd import PSGD, FiniteDifference, HessianVector

from ..cases import batch, small_model
from .packages import needs_inductor


@pytest.fixture(params=["aot_eager", "inductor"])
def compiled(request):
    if request.param == "inductor":
        needs_inductor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it imports and traces
        torch._dynamo.reset()
        yield torch.compile(small_model(torch.float64), backend=request.param)


def losses(model: nn.Module, called: nn.Module, probe, steps: int = 5) -> list[float]:
    optimizer = PSGD(model.parameters(), lr=0.05, probe=probe, max_norm=1.0)
    seen = []
    for step in range(steps):
        x, y = batch(step, torch.float64)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(called(x), y)
            if isinstance(probe, FiniteDifference):
                loss.backward()
            return loss

        seen.append(optimizer.step(closure).item())
    return seen


def test_finite_differences_see_the_weights_that_were_moved(compiled):
    plain = small_model(torch.float64)
    expected = losses(plain, plain, FiniteDifference())
    torch.testing.assert_close(losses(compiled, compiled, FiniteDifference()), expected, rtol=1e-6, atol=1e-9)


def test_hessian_vector_wants_the_model_that_was_compiled_in_its_closure(compiled):
    with pytest.raises(RuntimeError, match=r"differentiated twice, .* FiniteDifference\(\)"):
        losses(compiled, compiled, HessianVector())
    plain = small_model(torch.float64)
    expected = losses(plain, plain, HessianVector())
    assert losses(compiled, compiled._orig_mod, HessianVector()) == expected
