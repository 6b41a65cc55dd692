"""One optimizer for each parameter, which steps as soon as its gradient is there: during ``backward``."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from psgd import PSGD, FiniteDifference, HessianVector, Kronecker, Whitening

from ..cases import batch, small_model

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"`torch.jit\.\w+` is deprecated", DeprecationWarning)  # torch's own use of it
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers


def by_hooks(model: nn.Module, **options) -> list[PSGD]:
    optimizers = {p: PSGD([p], **options) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def by_torch(model: nn.Module, **options) -> list[PSGD]:
    _apply_optimizer_in_backward(PSGD, model.parameters(), options)
    return _get_in_backward_optimizers(model)


ways = pytest.mark.parametrize("fuse", [by_hooks, by_torch])


def backward(model: nn.Module, first: int, last: int, spoiled: int = -1) -> None:
    for step in range(first, last):
        x, y = batch(step, torch.float64)
        loss = nn.functional.mse_loss(model(x), y)
        if step == spoiled:  # the gradient of one bias, and of nothing else, is not finite
            loss = loss + model[5].bias.sum() * torch.inf
        loss.backward()


def whole(model: nn.Module, first: int, last: int, **options) -> PSGD:
    optimizer = PSGD(model.parameters(), **options)
    for step in range(first, last):
        optimizer.zero_grad()
        backward(model, step, step + 1)
        optimizer.step()
    return optimizer


@ways
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0, "weight_decay": 0.1, "update_every": 2, "update_anneal": 4},
        {"probe": Whitening(of_average=False)},
    ],
    ids=str,
)
def test_one_optimizer_per_parameter_takes_the_steps_of_one_for_all(fuse, options):
    """Whitening fits each tensor by itself; so does a step, but for rounding. Gradients are let go of at once."""
    options = {"lr": 0.01, "probe": Whitening(), **options}
    fused, together = small_model(torch.float64), small_model(torch.float64)
    assert len(fuse(fused, **options)) == 6
    backward(fused, 0, 10)
    whole(together, 0, 10, **options)
    assert all(p.grad is None for p in fused.parameters())
    assert not torch.equal(fused[0].weight, small_model(torch.float64)[0].weight)
    for a, b in zip(fused.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@ways
def test_what_belongs_to_all_parameters_together_differs(fuse):
    """``max_norm`` limits each parameter by itself, and only a parameter whose gradient is not finite is left out."""
    options = {"lr": 1.0, "probe": Whitening(), "max_norm": 0.01}
    model = small_model(torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = fuse(model, **options)
    backward(model, 0, 1)
    lengths = [(p.detach() - old).norm() for p, old in zip(model.parameters(), before, strict=True)]
    torch.testing.assert_close(torch.stack(lengths), torch.full((6,), 0.01, dtype=torch.float64))

    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 1, 2, spoiled=1)
    assert [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)] == [False] * 5 + [True]
    skipped = [int(entries["skipped"]) for optimizer in optimizers for entries in optimizer.state.values()]
    assert skipped == [0] * 5 + [1]


def test_random_numbers_differ_where_q_is_fitted_with_some():
    """They are a function of a parameter's position, which is 0 in each; a seed for each parameter tells them apart."""
    options = {"lr": 0.01, "probe": Whitening(), "preconditioner": Kronecker(inverse_free=False)}
    fused, together = small_model(torch.float64), small_model(torch.float64)
    optimizers = by_hooks(fused, **options)
    backward(fused, 0, 1)
    optimizer = whole(together, 0, 1, **options)
    Qs = [
        (own.state[p]["Q0_full"], optimizer.state[q]["Q0_full"])
        for own, p, q in zip(optimizers, fused.parameters(), together.parameters(), strict=True)
    ]
    assert [torch.allclose(a, b) for a, b in Qs] == [True] + [False] * 5


@ways
@pytest.mark.parametrize("probe", [FiniteDifference(), HessianVector()], ids=lambda p: type(p).__name__)
def test_probes_that_want_a_closure_say_so(fuse, probe):
    model = small_model(torch.float64)
    fuse(model, lr=0.1, probe=probe)
    with pytest.raises(ValueError, match=r"closure=None: \w+ wants step\(closure\); Whitening works without one"):
        backward(model, 0, 1)


@ways
def test_states_are_saved_one_by_one(fuse):
    options = {"lr": 0.01, "probe": Whitening()}
    straight = small_model(torch.float64)
    fuse(straight, **options)
    backward(straight, 0, 10)

    first, second = small_model(torch.float64), small_model(torch.float64)
    optimizers = fuse(first, **options)
    backward(first, 0, 4)
    second.load_state_dict(first.state_dict())
    for mine, theirs in zip(fuse(second, **options), optimizers, strict=True):
        mine.load_state_dict(theirs.state_dict())
    backward(second, 4, 10)
    assert all(map(torch.equal, second.parameters(), straight.parameters()))
