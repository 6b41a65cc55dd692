"""Mixed precision where the closure is called twice: ``GradScaler`` refuses closures, so they scale by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from psgd import PSGD, FiniteDifference, Whitening

from ..cases import batch, small_model, train


def test_a_grad_scaler_and_finite_differences_refuse_each_other_in_words():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = batch(0)
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        return loss

    closure()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported if GradScaler is enabled"):
        scaler.step(optimizer, closure=closure)
    with pytest.raises(ValueError, match=r"closure=None: FiniteDifference wants step\(closure\); Whitening works"):
        scaler.step(optimizer)
    assert all(map(torch.equal, model.parameters(), small_model().parameters()))


@pytest.mark.parametrize("probe", [FiniteDifference(), Whitening()], ids=lambda p: type(p).__name__)
def test_a_closure_that_scales_by_a_power_of_two_and_back_takes_the_same_steps(probe):
    """Every bit of them; and one that overflows is skipped by the optimizer, with nothing changed."""
    plain, scaled = small_model(), small_model()
    train(plain, PSGD(plain.parameters(), lr=0.02, probe=probe, max_norm=1.0), 0, 10)
    optimizer = PSGD(scaled.parameters(), lr=0.02, probe=probe, max_norm=1.0)

    def step(number: int, scale: float) -> None:
        x, y = batch(number)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ((scaled(x) - y) ** 2).mean()
            (loss * scale).backward()
            for p in scaled.parameters():
                p.grad /= scale
            return loss

        optimizer.step(closure)

    for number in range(10):
        step(number, 2.0**12)
    assert all(map(torch.equal, plain.parameters(), scaled.parameters()))
    first = scaled[0].weight
    Q = optimizer.state[first]["Q0_root"].clone()
    step(10, 2.0**130)  # more than a float32 can be
    assert all(map(torch.equal, plain.parameters(), scaled.parameters()))
    assert torch.equal(optimizer.state[first]["Q0_root"], Q)
    assert int(optimizer.state[first]["skipped"]) == 1


def measured(std: float | None, dtype: torch.dtype) -> float:
    """How far the change of the gradient under autocast is from that in full precision, relative."""
    x, y = batch(0, size=256)

    def change(enabled: bool) -> Tensor:
        model = small_model()
        found: list[Tensor] = []

        def closure() -> Tensor:
            model.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                loss = nn.functional.mse_loss(model(x).float(), y)
            loss.backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            return loss

        PSGD(model.parameters(), lr=0.1, probe=FiniteDifference(std)).step(closure)
        return found[1] - found[0]

    exact, coarse = change(False), change(True)
    return float((coarse - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_differences_are_taken_over_what_its_dtype_can_tell_apart(dtype: torch.dtype):
    """As ``FiniteDifference`` says: ``std`` is the root of the precision that the model computes in."""
    assert measured(torch.finfo(dtype).eps ** 0.5, dtype) < min(0.35, 0.5 * measured(None, dtype))
