"""Closures that are not what a probe with two calls wants are told, once; those that are right are not."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from psgd import PSGD, Dense, Diagonal, FiniteDifference, HessianVector, PSGDWarning, Whitening
from psgd.ops import distributed
from psgd.probes import closure_checks
from psgd.probes.closure_checks import STEPS, disagrees

from ..cases import batch, small_model, train

BATCH, ADDS, BUFFERS = (
    "another mini-batch",
    "adds to the gradients of the step before",
    r"FiniteDifference\(module=model\)",
)


@contextmanager
def saying(*messages: str) -> Iterator[None]:
    """Context in which these words are said, each once, and no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught]
    assert all(issubclass(each.category, PSGDWarning) for each in caught)
    assert len(said) == len(messages), said
    for message, words in zip(messages, said, strict=True):
        assert pytest.raises(AssertionError, match=message).matches(AssertionError(words)), words


def run(
    loss_of: Callable[[], torch.Tensor],
    optimizer: PSGD,
    steps: int = 2 * STEPS,
    clear: Callable[[], None] | None = None,
) -> None:
    def closure():
        (clear or optimizer.zero_grad)()
        loss = loss_of()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


# Another mini-batch.


def fetching(dtype: torch.dtype = torch.float32, size: int = 16):
    """A model, and its loss on another mini-batch at each call."""
    model, calls = small_model(dtype), iter(range(10**6))

    def loss_of():
        x, y = batch(next(calls), dtype, size)
        return ((model(x) - y) ** 2).mean()

    return model, loss_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_closure_that_fetches_a_mini_batch_is_told(dtype):
    model, loss_of = fetching(dtype)
    with saying(BATCH):
        run(loss_of, PSGD(model.parameters(), lr=0.01))


def test_it_is_told_at_the_tenth_pair_of_calls():
    model, loss_of = fetching()
    optimizer = PSGD(model.parameters(), lr=0.01, update_every=2)
    with saying():
        run(loss_of, optimizer, 2 * STEPS - 2)
    with saying(BATCH):
        run(loss_of, optimizer, 1)


def test_each_optimizer_looks_for_itself():
    """Though they share the default probe."""
    for _ in range(2):
        model, loss_of = fetching()
        with saying(BATCH):
            run(loss_of, PSGD(model.parameters(), lr=0.01))


def test_numbers_for_losses_are_understood():
    model, loss_of = fetching()
    optimizer = PSGD(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss.item()

    with saying(BATCH):
        for _ in range(STEPS):
            optimizer.step(closure)


def test_random_numbers_of_numpy_are_told_and_those_of_torch_are_not():
    model, (x, y) = small_model(), batch(0)
    rng = np.random.default_rng(0)
    with saying(BATCH):
        run(
            lambda: ((model(x + torch.from_numpy(rng.normal(size=x.shape)).float()) - y) ** 2).mean(),
            PSGD(model.parameters()),
        )
    with saying():
        run(lambda: ((model(x + torch.randn_like(x)) - y) ** 2).mean(), PSGD(model.parameters(), lr=0.01))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probe", [FiniteDifference(), HessianVector(), Whitening()], ids=lambda p: type(p).__name__)
def test_ordinary_loops_are_silent(probe, dtype):
    model = small_model(dtype, dropout=0.2)
    with saying():
        train(model, PSGD(model.parameters(), lr=0.01, probe=probe), 0, 2 * STEPS)


def test_batched_calls_are_silent():
    model = small_model()
    probe = FiniteDifference(module=model, batched=True)
    with saying():
        train(model, PSGD(model.parameters(), lr=0.01, probe=probe), 0, 2 * STEPS)


@pytest.mark.parametrize("std", [None, 0.09])
def test_autocast_is_silent(std):
    model, (x, y) = small_model(), batch(0, size=64)

    def loss_of():
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.mse_loss(model(x).float(), y)

    with saying():
        run(loss_of, PSGD(model.parameters(), lr=0.01, probe=FiniteDifference(std)))


@pytest.mark.parametrize(
    "returned",
    [
        lambda f: 1000 * f,
        lambda f: -f,
        lambda f: 0.0,
        lambda f: None,
        lambda f: torch.full((), 7),
        lambda f: f.expand(3),
    ],
)
def test_a_loss_that_is_not_that_of_the_gradients_is_silent(returned):
    model, (x, y) = small_model(), batch(0)
    optimizer = PSGD(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        return returned(loss.detach())

    with saying():
        for _ in range(2 * STEPS):
            optimizer.step(closure)


def test_gradients_that_are_clipped_in_the_closure_are_silent():
    model, (x, y) = small_model(), batch(0)
    optimizer = PSGD(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = 100 * ((model(x) - y) ** 2).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    with saying():
        for _ in range(2 * STEPS):
            optimizer.step(closure)


@pytest.mark.parametrize("f", ["valley", "kinks", "minimum", "rough"])
def test_functions_that_are_hard_are_silent(f: str):
    theta = torch.tensor([-1.0, 1.0], requires_grad=True)
    loss_of = {
        "valley": lambda: (1 - theta[0]) ** 2 + 100 * (theta[1] - theta[0] ** 2) ** 2,
        "kinks": lambda: (theta * torch.linspace(-3000, 3000, 200)[:, None] + 0.1).relu().sum(),
        "minimum": lambda: 1e6 * ((theta.detach() - theta) ** 2).sum() + 5,
        "rough": lambda: (3e3 * theta).sin().sum(),
    }[f]
    with saying():
        run(loss_of, PSGD([theta], lr=1e-3, preconditioner=Dense(), max_norm=1.0))


def test_steps_that_are_not_finite_are_silent():
    theta = torch.ones(3, requires_grad=True)
    with saying():
        run(lambda: (theta / 0).sum() - math.inf, PSGD([theta]), STEPS)


def test_other_kinds_of_parameters_are_silent():
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    w = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    with saying():
        run(lambda: (z * z.conj()).real.sum() + (w**2).sum(), PSGD([z, w], lr=0.01))


def test_ranks_may_have_losses_of_their_own(monkeypatch):
    """The mean of many gradients is shorter than each of them."""
    rows = [[(-1) ** i * 0.1, 1.0, 0.01, 0.01] for i in range(STEPS)]
    assert disagrees(rows)
    monkeypatch.setattr(closure_checks, "number_of_ranks", lambda: 64)
    assert not disagrees(rows)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ([0.1, 1.0, 0.001, 0.001], False),  # of the right sign: a multiple of the loss
        ([-0.1, 1.0, 0.001, 0.001], True),
        ([-0.1, 1.0, 0.1, 0.1], False),
        ([-0.003, 1.0, 0.0001, 0.0001], False),  # rounding
        ([-0.003, 0.1, 0.0001, 0.0001], True),
        ([math.nan, 1.0, 0.001, 0.001], False),
        ([math.inf, 1.0, -0.001, -0.001], False),
        ([-0.1, 1.0, math.nan, 0.0], False),
    ],
)
def test_what_counts_as_wrong(row: list[float], wrong: bool):
    assert disagrees([row] * STEPS) == wrong
    assert disagrees([row] * 7 + [[0.0, 1.0, 0.0, 0.0]] * 3) == wrong
    assert not disagrees([row] * 6 + [[0.0, 1.0, 0.0, 0.0]] * 4)


# Gradients of the step before.


@pytest.mark.parametrize("times", [1, 2])
def test_a_closure_without_zero_grad_is_told(times: int):
    theta = torch.ones(3, requires_grad=True)
    optimizer = PSGD([theta], lr=0.0)

    def closure():
        for _ in range(times):
            loss = (theta**2).sum()
            loss.backward()
        return loss

    with saying(ADDS):
        for _ in range(2 * STEPS):
            optimizer.step(closure)
    assert theta.grad.tolist() == [2.0 * times * 2 * STEPS] * 3


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_that_are_cleared_are_silent(set_to_none: bool, inside: bool):
    model, (x, y) = small_model(), batch(0)
    optimizer = PSGD(model.parameters(), lr=0.01)

    def clear():
        optimizer.zero_grad(set_to_none=set_to_none)

    with saying():
        for _ in range(2 * STEPS):
            if not inside:
                clear()
            run(lambda: ((model(x) - y) ** 2).mean(), optimizer, 1, clear if inside else lambda: None)


def test_gradients_that_are_accumulated_on_purpose_are_silent():
    """All but the last mini-batch before the step."""
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01)
    with saying():
        for step in range(2 * STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for i in range(3):
                x, y = batch(4 * step + i)
                ((model(x) - y) ** 2).mean().backward()
            x, y = batch(4 * step + 3)
            run(lambda: ((model(x) - y) ** 2).mean(), optimizer, 1, lambda: None)  # noqa: B023


def test_gradients_that_nobody_needs_are_freed():
    theta = torch.ones(3, requires_grad=True)
    optimizer = PSGD([theta], lr=0.0)
    run(lambda: (theta**2).sum(), optimizer, 2)
    grad = closure_checks.TensorWeakRef(theta.grad)
    optimizer.zero_grad()
    assert grad() is None


# Buffers.


class Counting(nn.Module):
    """Module that replaces a buffer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x


def with_buffers(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), layer, nn.Linear(3, 1))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, affine=False),
        Counting(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    ],
)
def test_buffers_that_nothing_restores_are_told(layer: nn.Module):
    model = with_buffers(copy.deepcopy(layer))
    with saying(BUFFERS):
        train(model, PSGD(model.parameters(), lr=0.01), 0, 2 * STEPS)


def test_the_module_is_named():
    model = with_buffers(nn.BatchNorm1d(3))
    with saying(r"it changes buffers of BatchNorm1d, and FiniteDifference calls it twice"):
        train(model, PSGD(model.parameters(), lr=0.01), 0, 1)


def test_buffers_that_are_restored_or_do_not_change_are_silent():
    model = with_buffers(nn.BatchNorm1d(3))
    with saying():
        train(model, PSGD(model.parameters(), lr=0.01, probe=FiniteDifference(module=model)), 0, 2 * STEPS)
        train(model, PSGD(model.parameters(), lr=0.01, probe=Whitening()), 0, 2 * STEPS)
        model.eval()
        train(model, PSGD(model.parameters(), lr=0.01), 0, 2 * STEPS)


def test_buffers_of_inference_mode_count_no_changes():
    model = with_buffers(nn.Identity())
    with torch.inference_mode():
        model.register_buffer("made", torch.ones(2))
    with saying():
        train(model, PSGD(model.parameters(), lr=0.01), 0, 2)


def test_a_probe_of_ones_own_is_observed_if_it_calls_twice():
    class Mine(FiniteDifference):
        pass

    model, loss_of = fetching()
    with saying(BATCH):
        run(loss_of, PSGD(model.parameters(), lr=0.01, probe=Mine(), preconditioner=Diagonal()))


def test_warnings_that_are_errors_leave_the_step_untaken():
    model = with_buffers(nn.BatchNorm1d(3))
    optimizer = PSGD(model.parameters(), lr=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PSGDWarning):
            train(model, optimizer, 0, 1)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, 0, 3)


def test_the_first_steps_are_the_only_ones_that_are_observed():
    model, (x, y) = small_model(), batch(0)
    optimizer = PSGD(model.parameters(), lr=0.01)
    run(lambda: ((model(x) - y) ** 2).mean(), optimizer, STEPS)
    closure = object()
    assert optimizer._closure_checks.watch(closure, optimizer.probe, optimizer.parameters()) is closure


def test_one_process_is_one_rank():
    assert distributed.number_of_ranks() == 1
