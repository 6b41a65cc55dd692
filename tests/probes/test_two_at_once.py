"""Both gradients of a finite difference at once: the same pairs, and errors where that is not possible."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from psgd import PSGD, FiniteDifference
from tests.probes.test_probes import measure

from ..cases import small_model


class Tied(nn.Module):
    """The weights of the first layer, transposed, are those of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 7, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.embed(x))))


class Shared(nn.Module):
    """One layer, used twice and known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (small_model, (8, 4)),
    "conv": (conv, (5, 2, 4, 4)),
    "batch_norm": (batch_norm, (8, 4)),
    "tied": (Tied, (8, 3)),
    "shared": (Shared, (8, 4)),
    "attention": (attention, (3, 5, 4)),
}
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention, on CPUs
models = pytest.mark.parametrize("name", MODELS)


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Callable[[], Tensor]]:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().to(dtype)
    x = torch.randint(0, 7, shape) if name == "tied" else torch.randn(shape, dtype=dtype)
    return model, lambda: (model(x) ** 2).mean()


def backward(model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return closure


@models
def test_pairs_are_those_of_two_passes(name: str):
    model, loss_of = make(name)
    twin, twin_loss_of = make(name)
    params, twins = list(model.parameters()), list(twin.parameters())
    before = [p.detach().clone() for p in params]
    ours = measure(FiniteDifference(module=model, batched=True), params, loss_of)
    right = measure(FiniteDifference(module=twin), twins, backward(twin, twin_loss_of))
    torch.testing.assert_close(ours.loss, right.loss.detach(), rtol=1e-12, atol=0)
    assert ours.pairs.keys() == right.pairs.keys()
    size = max(dgrad.abs().max().item() for _, dgrad in right.pairs.values())
    for i, (dtheta, dgrad) in right.pairs.items():
        assert torch.equal(ours.pairs[i][0], dtheta)
        torch.testing.assert_close(ours.grads[i], right.grads[i], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(ours.pairs[i][1], dgrad, rtol=1e-6, atol=1e-6 * size)
    # The parameters keep their bits, and buffers are as after one call.
    assert all(map(torch.equal, params, before))
    assert all(p.grad is None for p in params)
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@models
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_training_is_that_of_two_passes(name: str, dtype: torch.dtype):
    losses = []
    for batched in (True, False):
        model, loss_of = make(name, dtype)
        probe = FiniteDifference(module=model, batched=batched)
        optimizer = PSGD(model.parameters(), lr=0.05, probe=probe, update_every=2, max_norm=1.0)
        closure = loss_of if batched else backward(model, loss_of)
        losses.append([optimizer.step(closure).item() for _ in range(6)])
        assert losses[-1][-1] < losses[-1][0]
        if name == "batch_norm":
            assert int(model[1].num_batches_tracked) == 6
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.2}[dtype]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def test_dropout_sees_the_same_mask_in_both():
    model = small_model(torch.float64, dropout=0.5)
    x = torch.randn(8, 4, dtype=torch.float64)
    params = list(model.parameters())
    found = measure(FiniteDifference(module=model, batched=True), params, lambda: (model(x) ** 2).mean())
    size = max(dgrad.abs().max() for _, dgrad in found.pairs.values())
    assert 0 < size < 1e-5  # another mask would change the gradient by about one


def test_without_an_update_the_closure_is_evaluated_once_and_plainly():
    model, _ = make("linear")
    shapes = []

    def closure() -> Tensor:
        weight = model[0].weight
        shapes.append(isinstance(weight, nn.Parameter))
        return (weight**2).sum()

    optimizer = PSGD(model.parameters(), lr=0.1, probe=FiniteDifference(module=model, batched=True), update_every=3)
    for _ in range(4):
        optimizer.step(closure)
    assert shapes == [False, True, True, False]


def test_parameters_of_all_kinds():
    """Some frozen, some unused, some complex, some of another group that is not due."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.later = (nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(3))
            self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
            self.z = nn.Parameter(torch.randn(3, dtype=torch.complex128))

        def forward(self) -> Tensor:
            return (self.used * self.frozen) ** 4 + self.later**2 + (self.z**2).real * self.used

    results = []
    for batched in (True, False):
        torch.manual_seed(0)
        model = Model()
        probe = FiniteDifference(module=model, batched=batched)
        groups = [
            {"params": [model.used, model.unused, model.frozen, model.z]},
            {"params": [model.later], "update_every": 2},
        ]
        optimizer = PSGD(groups, lr=0.1, probe=probe, weight_decay=0.1)
        loss_of: Callable[[], Tensor] = lambda model=model: model().sum()  # noqa: E731
        for _ in range(4):
            optimizer.step(loss_of if batched else backward(model, loss_of))
        results.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_gradients_and_random_numbers_of_the_user_are_left_alone():
    model, loss_of = make("linear")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    mine = [p.grad for p in model.parameters()]
    optimizer = PSGD(model.parameters(), probe=FiniteDifference(module=model, batched=True))

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        return loss_of()

    state = torch.get_rng_state()
    optimizer.step(closure)
    assert torch.equal(state, torch.get_rng_state())
    for p, grad in zip(model.parameters(), mine, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, torch.ones_like(grad))


def test_it_works_under_autocast_and_can_be_copied():
    model, loss_of = make("linear", torch.float32)
    optimizer = PSGD(model.parameters(), lr=0.05, probe=FiniteDifference(module=model, batched=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            optimizer.step(loss_of)
    twin, again = copy.deepcopy((model, optimizer))
    assert again.probe.module is twin
    assert "batched=True" in repr(optimizer)
    assert "batched" not in repr(FiniteDifference())


def expect(model: nn.Module, closure: Callable[[], object], match: str, params: object = None) -> None:
    """The step fails and says why, and neither parameters nor buffers changed."""
    params = list(model.parameters()) if params is None else params
    optimizer = PSGD(params, lr=0.1, probe=FiniteDifference(module=model, batched=True))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        optimizer.step(closure)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_errors_say_what_to_do():
    model, loss_of = make("linear")
    with pytest.raises(ValueError, match=r"module=None: FiniteDifference\(batched=True\) wants"):
        FiniteDifference(batched=True)
    expect(model, backward(model, loss_of), r"closure: it called backward\(\); FiniteDifference\(batched=True\) wants")
    expect(model, lambda: loss_of().item(), r"could not be evaluated for two .*batched=False\) works")
    expect(model, lambda: 1.0, "closure: it returned 1.0; ")
    expect(model, lambda: model(torch.ones(3, 4, dtype=torch.float64)), r"it returned a tensor of shape \(3, 1\)")
    expect(model, lambda: torch.ones(()), "does not depend on any parameter")
    other = torch.ones(2, requires_grad=True)
    expect(model, loss_of, "module=Sequential: parameter 6 of the optimizer", [*model.parameters(), other])
    weight = model[0].weight
    expect(model, lambda: loss_of() + (weight**2).sum(), "it uses parameter 0, 0.weight, not by way of the module")


def test_a_model_that_looks_at_its_values_is_refused():
    model, loss_of = make("linear")

    def looks() -> Tensor:
        loss = loss_of()
        return loss if loss > 0 else -loss

    expect(model, looks, r"could not be evaluated for two sets .*data-dependent.*batched=False\) works")
    optimizer = PSGD(model.parameters(), lr=0.1, probe=FiniteDifference(module=model))
    optimizer.step(backward(model, looks))


def test_batch_norm_that_counts_on_the_host_is_refused():
    """A cumulative average needs the count as a number, so it cannot have two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
    x = torch.randn(8, 4)
    expect(model, lambda: nn.functional.softplus(model(x)).mean(), r"could not be evaluated for two sets")


def test_buffers_that_are_replaced_come_out_too():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("seen", torch.zeros(3))
            self.register_buffer("fixed", torch.ones(1).expand(3))  # cannot be written to

        def forward(self) -> Tensor:
            self.seen = 0.5 * self.seen + self.w.detach()
            return (self.w**2 * self.fixed).sum()

    model = Counts()
    optimizer = PSGD(model.parameters(), lr=0.0, probe=FiniteDifference(module=model, batched=True))
    for _ in range(2):
        optimizer.step(model)
    assert torch.equal(model.seen, torch.full((3,), 1.5))
    assert model.state_dict().keys() == {"w", "seen", "fixed"}
