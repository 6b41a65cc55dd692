"""Steps that are skipped one after the other are told once, and only if it is all of them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from psgd import PSGD, FiniteDifference, HessianVector, PSGDWarning, Whitening
from psgd.ops import streams
from psgd.state import skips
from psgd.state.skips import EVERY, SkipCheck

from ..cases import small_model, train

DEVICE = torch.device("cpu")


def frozen(optimizer: PSGD, theta: torch.Tensor, steps: int, bad=lambda step: True) -> None:
    for step in range(steps):
        theta.grad = torch.full_like(theta, torch.nan if bad(step) else 1.0)
        optimizer.step()


def test_a_frozen_run_says_so_once():
    theta = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frozen(PSGD([theta], probe=Whitening()), theta, 5 * EVERY)
    (said,) = [str(each.message) for each in caught]
    assert "skipped 20 steps in a row" in said
    assert "error_if_nonfinite=True" in said


def test_it_is_told_at_the_second_look():
    theta = torch.ones(3, requires_grad=True)
    optimizer = PSGD([theta], probe=Whitening())
    frozen(optimizer, theta, EVERY)
    with pytest.warns(PSGDWarning, match="in a row"):
        frozen(optimizer, theta, 1)


def test_a_run_that_freezes_later_says_so():
    theta = torch.ones(3, requires_grad=True)
    optimizer = PSGD([theta], lr=0.01, probe=Whitening())
    frozen(optimizer, theta, 3 * EVERY, bad=lambda step: False)
    with pytest.warns(PSGDWarning, match="in a row"):
        frozen(optimizer, theta, 2 * EVERY)


@pytest.mark.parametrize("probe", [FiniteDifference(), HessianVector(), Whitening()], ids=lambda p: type(p).__name__)
def test_ordinary_runs_are_silent(probe):
    model = small_model()
    train(model, PSGD(model.parameters(), lr=0.01, probe=probe, max_norm=1.0), 0, 3 * EVERY)


def test_steps_that_are_skipped_now_and_then_are_silent():
    theta = torch.ones(3, requires_grad=True)
    frozen(PSGD([theta], lr=0.01, probe=Whitening()), theta, 4 * EVERY, bad=lambda step: step % EVERY > 1)


def test_counts_of_a_checkpoint_are_none_of_this_run():
    """Loaded between two looks, they would look like skipped steps."""
    check = SkipCheck()
    for _ in range(EVERY):
        check({DEVICE: torch.tensor(0)})
    loaded = torch.tensor(EVERY)
    for _ in range(3 * EVERY):
        check({DEVICE: loaded})


def test_a_copy_looks_for_itself():
    theta = torch.ones(3, requires_grad=True)
    optimizer = PSGD([theta], probe=Whitening())
    with pytest.warns(PSGDWarning):
        frozen(optimizer, theta, 2 * EVERY)
    other = copy.deepcopy(optimizer)
    with pytest.warns(PSGDWarning):
        frozen(other, other.parameters()[0], 2 * EVERY)


class Slow(streams.Arrival):
    """Copy that arrives when it is asked for the third time."""

    asked = 0

    def read(self) -> torch.Tensor | None:
        self.asked += 1
        return super().read() if self.asked > 2 else None


def test_a_count_that_is_late_is_waited_for_without_blocking(monkeypatch):
    monkeypatch.setattr(skips, "Arrival", Slow)
    check, counter = SkipCheck(), torch.tensor(0)

    def take(steps: int) -> None:
        for _ in range(steps):
            counter.add_(1)
            check({DEVICE: counter})

    take(4 * EVERY)
    with pytest.warns(PSGDWarning, match="skipped 40 steps in a row"):
        take(EVERY)
