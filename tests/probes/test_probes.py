"""Where pairs come from: exactly what was asked for, and nothing else touched."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from psgd import PSGD, Diagonal, FiniteDifference, HessianVector, PSGDWarning, Whitening
from psgd.ops.real import as_real
from psgd.probes import Probe
from psgd.probes.noise import Noise
from psgd.probes.restore import Gradients

from ..cases import batch, small_model, train


def measure(probe: Probe, params, closure, step: int = 0):
    noise = Noise(step)
    with torch.no_grad():
        return probe(closure, params, range(len(params)), lambda i: noise(as_real(params[i]), 0, i), Gradients(params))


def problem(dtype=torch.float64, dropout=0.0):
    model = small_model(dtype, dropout)
    x, y = batch(0, dtype)

    def loss_of():
        return ((model(x) - y) ** 2).mean()

    def closure():
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return model, list(model.parameters()), loss_of, closure


def hessian(model, loss_of) -> torch.Tensor:
    params = list(model.parameters())
    grads = torch.autograd.grad(loss_of(), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in grads])
    rows = [torch.autograd.grad(v, params, retain_graph=True, materialize_grads=True) for v in flat]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


@pytest.mark.parametrize("kind", [FiniteDifference, HessianVector])
def test_pairs_satisfy_the_secant_equation(kind):
    model, params, loss_of, closure = problem()
    H = hessian(model, loss_of)
    evaluation = measure(kind(), params, loss_of if kind is HessianVector else closure)
    dtheta = torch.cat([evaluation.pairs[i][0].flatten() for i in range(len(params))])
    dgrad = torch.cat([evaluation.pairs[i][1].flatten() for i in range(len(params))])
    torch.testing.assert_close(dgrad, H @ dtheta, rtol=1e-5, atol=1e-5 * dtheta.abs().max().item())
    grads = torch.autograd.grad(loss_of(), params)
    for ours, right in zip(evaluation.grads, grads, strict=True):
        torch.testing.assert_close(ours, right)
    assert evaluation.loss.item() == loss_of().item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_perturbation_is_that_of_the_paper_and_leaves_no_bit_changed(dtype):
    _, params, _, closure = problem(dtype)
    before = [p.detach().clone() for p in params]
    drawn = []
    for step in range(50):
        evaluation = measure(FiniteDifference(), params, closure, step)
        drawn.append(torch.cat([evaluation.pairs[i][0].flatten().double() for i in range(len(params))]))
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p, old)
    noise = torch.cat(drawn)
    assert noise.std().item() == pytest.approx(torch.finfo(dtype).eps ** 0.5, rel=0.05)


def test_delta_theta_is_what_rounding_let_through():
    theta = torch.tensor([1000.0, 1e6, 1e-6], requires_grad=True)
    seen = []

    def closure():
        seen.append(theta.detach().clone())
        theta.grad = theta.detach() * 2
        return theta.detach().sum()

    evaluation = measure(FiniteDifference(), [theta], closure)
    dtheta, dgrad = evaluation.pairs[0]
    assert torch.equal(dtheta, seen[1] - seen[0])
    assert torch.equal(dgrad, seen[1] * 2 - seen[0] * 2)
    assert dtheta[1] == 0  # too small for a number so large


def test_dropout_sees_the_same_mask_in_both_gradients():
    model, params, _, closure = problem(dropout=0.5)
    torch.manual_seed(3)
    evaluation = measure(FiniteDifference(), params, closure)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    model.zero_grad()
    closure()
    assert torch.equal(after, torch.get_rng_state())
    size = max(pair[1].abs().max() for pair in evaluation.pairs.values())
    assert size < 1e-5  # another mask would change the gradient by about one


def test_random_numbers_go_on_from_the_first_call():
    """Also if the second call draws more of them, as a closure may that counts its calls."""
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    states = []

    def closure():
        torch.randn(1 + 5 * len(states))
        theta.grad = 2 * theta.detach()
        states.append(torch.get_rng_state())
        return 0.0

    measure(FiniteDifference(), [theta], closure)
    assert not torch.equal(*states)
    assert torch.equal(torch.get_rng_state(), states[0])


def test_buffers_are_updated_once_with_module_and_twice_without():
    for module in (False, True):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        probe = FiniteDifference(module=model if module else None)
        optimizer = PSGD(model.parameters(), lr=0.01, probe=probe, update_every=2)
        with nullcontext() if module else pytest.warns(PSGDWarning, match=r"FiniteDifference\(module=model\)"):
            train(model, optimizer, 0, 4)
        assert int(model[1].num_batches_tracked) == (4 if module else 6)
        assert "Sequential" in repr(optimizer) or not module


def test_closure_that_adds_to_gradients_is_measured_right():
    """Without zero_grad, as in gradient accumulation: both calls start from the same gradients."""
    theta = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    theta.grad = torch.tensor([10.0, 20.0], dtype=torch.float64)

    def closure():
        loss = (theta**2).sum()
        loss.backward()
        return loss

    evaluation = measure(FiniteDifference(), [theta], closure)
    dtheta, dgrad = evaluation.pairs[0]
    torch.testing.assert_close(dgrad, 2 * dtheta, rtol=1e-6, atol=0)
    assert torch.equal(theta.grad, torch.tensor([12.0, 24.0], dtype=torch.float64))


def test_gradients_in_one_flat_buffer_are_not_overwritten():
    """As DDP and some training frameworks keep them: the second backward pass writes into the same memory."""
    flat = torch.zeros(4, dtype=torch.float64)
    a, b = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([1.0, 2.0], [3.0, 4.0]))

    def closure():
        flat.copy_(torch.cat([3 * a.detach(), 5 * b.detach()]))
        a.grad, b.grad = flat[:2], flat[2:]
        return 0.0

    evaluation = measure(FiniteDifference(), [a, b], closure)
    for i, factor in enumerate((3, 5)):
        dtheta, dgrad = evaluation.pairs[i]
        torch.testing.assert_close(dgrad, factor * dtheta, rtol=1e-5, atol=0)
        assert dgrad.abs().max() > 0
    assert torch.equal(evaluation.grads[0], torch.tensor([3.0, 6.0], dtype=torch.float64))


@pytest.mark.parametrize("probe", [FiniteDifference(), Whitening()], ids=lambda p: type(p).__name__)
def test_gradients_that_live_in_a_buffer_of_the_user_stay_there(probe):
    flat = torch.zeros(4)
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    a.grad, b.grad = flat[:2], flat[2:]
    mine = [a.grad, b.grad]
    optimizer = PSGD([a, b], lr=0.0, probe=probe)

    def closure():
        flat.zero_()
        loss = (a**2).sum() + 3 * (b**2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        assert flat.tolist() == [2.0, 2.0, 6.0, 6.0]
        assert a.grad is mine[0]
        assert b.grad is mine[1]


def test_a_step_under_autocast_sees_the_perturbed_weights():
    """Autocast keeps casted weights; they must not be those from before the perturbation, nor those from within it."""
    model = small_model()
    x, y = batch(0)
    optimizer = PSGD(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        return loss

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            optimizer.step(closure)
        Q = optimizer.state[model[3].weight]["Q0_root"]
        assert not torch.equal(Q, torch.eye(6))
        assert Q.dtype == torch.float32


def test_whitening_takes_the_gradients_that_are_there_and_measures_nothing():
    _, params, _, closure = problem()
    closure()
    evaluation = measure(Whitening(), params, None)
    for i, p in enumerate(params):
        assert evaluation.grads[i] is p.grad
    assert not evaluation.pairs
    assert evaluation.loss is None


@pytest.mark.parametrize("accumulated", [False, True])
def test_whitening_takes_what_a_closure_leaves_as_optimizers_of_torch_do(accumulated: bool):
    """No gradients, no step; those from before the closure count."""
    _, params, _, closure = problem()
    optimizers = [PSGD(params, lr=0.1, probe=Whitening(), weight_decay=0.1), torch.optim.SGD(params, lr=0.1)]
    for optimizer in optimizers:
        closure()
        if not accumulated:
            optimizer.zero_grad()
        before = [p.detach().clone() for p in params]
        assert optimizer.step(lambda: torch.tensor(3.0)) == 3
        assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True)) != accumulated
    state = optimizers[0].state[params[0]]
    assert int(state["skipped"]) == 0
    if not accumulated:
        assert torch.equal(state["Q0_root"], torch.eye(len(state["Q0_root"])).to(state["Q0_root"]))
        assert not state["momentum"].any()


@pytest.mark.parametrize("probe", [FiniteDifference(), Whitening()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_closure_without_a_loss_says_that_there_is_nothing_to_add(probe, accumulated: bool):
    """Frameworks leave out a mini-batch by returning None; then gradients are those that are there, or none."""
    _, params, _, closure = problem()
    optimizer = PSGD(params, lr=0.1, probe=probe)
    closure()

    def nothing():
        if not accumulated:
            optimizer.zero_grad()

    before = [p.detach().clone() for p in params]
    Qs = [optimizer.state[p]["Q0_root"].clone() for p in params]
    assert optimizer.step(nothing) is None
    assert any(not torch.equal(p, old) for p, old in zip(params, before, strict=True)) == accumulated
    assert int(optimizer.state[params[0]]["skipped"]) == 0
    if isinstance(probe, FiniteDifference):  # nothing was measured
        assert all(torch.equal(optimizer.state[p]["Q0_root"], Q) for p, Q in zip(params, Qs, strict=True))


@pytest.mark.parametrize("why", ["compiled", "attention"])
def test_what_cannot_be_differentiated_twice_is_told_with_a_way_out(why: str):
    torch._dynamo.reset()
    theta = torch.ones(1, 2, 4, 8, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it imports and traces
        f = {
            "compiled": torch.compile(lambda x: x.square().sum(), backend="aot_eager"),
            "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x).sum(),
        }[why]
        optimizer = PSGD([theta], lr=0.1, probe=HessianVector(), preconditioner=Diagonal())
        with pytest.raises(RuntimeError, match=r"HessianVector .* differentiated twice, .*; FiniteDifference\(\)"):
            optimizer.step(lambda: f(theta))
    assert torch.equal(theta, torch.ones(1, 2, 4, 8))
    assert int(optimizer.state[theta]["step"]) == 0


def test_hessian_vector_of_a_linear_loss_is_zero_and_harmless():
    theta = torch.ones(3, requires_grad=True)
    optimizer = PSGD([theta], lr=0.1, probe=HessianVector())
    for _ in range(3):
        optimizer.step(lambda: theta.sum())
    torch.testing.assert_close(theta.detach(), torch.full((3,), 0.7))
    assert torch.equal(optimizer.state[theta]["Q0_root"], torch.eye(3))


def test_hessian_vector_keeps_no_graph_where_nothing_is_to_be_differentiated_twice():
    """It would hold the activations of the whole model."""
    theta = torch.ones(3, requires_grad=True)
    losses = []

    def closure():
        losses.append(theta.exp().sum())
        return losses[-1]

    HessianVector()(closure, [theta], [], lambda i: torch.ones(3), Gradients([theta]))
    with pytest.raises(RuntimeError, match="a second time"):
        losses[-1].backward()


def test_hessian_vector_with_parameters_of_all_kinds():
    used, linear, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    frozen = torch.ones(2)
    optimizer = PSGD([used, linear, unused, frozen], lr=0.1, probe=HessianVector())
    optimizer.step(lambda: (used**3).sum() + linear.sum())
    assert not torch.equal(used, torch.ones(2))
    assert not torch.equal(linear, torch.ones(2))
    assert torch.equal(unused, torch.ones(2))
    assert torch.equal(frozen, torch.ones(2))


def test_hessian_vector_ignores_zero_grad_in_the_closure():
    model, params, loss_of, _ = problem()
    optimizer = PSGD(params, lr=0.01, probe=HessianVector())

    def closure():
        optimizer.zero_grad()
        return loss_of()

    optimizer.step(closure)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_damping_is_relative_to_the_block(size):
    dtheta, dgrad = torch.randn(2, 3), torch.randn(2, 3) * size
    dgrad[1] = 0
    damped, informative = Whitening(damping=0.5).damp(dtheta, dgrad)
    ratio = 0.5 * dgrad.abs().amax(1, keepdim=True) / dtheta.abs().amax(1, keepdim=True)
    torch.testing.assert_close(damped, dgrad + ratio * dtheta)
    assert torch.equal(damped[1], torch.zeros(3))
    assert informative.tolist() == [True, False]
    assert torch.equal(Whitening(damping=0.0).damp(dtheta, dgrad)[0], dgrad)


def test_pairs_that_say_nothing_are_known_as_such():
    dtheta = torch.ones(7, 3)
    dgrad = torch.ones(7, 3) * torch.tensor([1.0, 1e-20, 1e-42, 0.0, 1e30, torch.inf, torch.nan])[:, None]
    damped, informative = Whitening().damp(dtheta, dgrad)
    assert informative.tolist() == [True] + [False] * 6
    assert torch.equal(damped[1:6], dgrad[1:6])
    assert Whitening().damp(torch.zeros(7, 3), dgrad)[1].tolist() == [False] * 7
    wide = Whitening().damp(dtheta.double(), dgrad.double())[1]
    assert wide.tolist() == [True, True, False, False, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("slope", [0.5, 0.0])
def test_damping_bounds_p_where_there_is_no_curvature(slope: float):
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizer = PSGD([theta], lr=0.0, probe=HessianVector(damping=1e-2), precond_lr=0.05)
    for _ in range(1000):
        optimizer.step(lambda: 3.0 * theta[0] ** 2 + slope * theta[1])
    Q = optimizer.state[theta]["Q0_root"]
    P = Q.mT @ Q
    assert P[0, 0].item() == pytest.approx(1 / 6, rel=0.2)
    if slope:  # the scale is that of the largest changes, which vary from pair to pair
        assert 1 / 6 * 1e1 < P[1, 1].item() < 1 / 6 * 1e4
    else:  # a parameter without a gradient says nothing
        assert 1 / 6 / 3 < P[1, 1].item() < 1 / 6 * 3  # where it started, from the pair of both
