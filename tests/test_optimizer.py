"""One step and its options: that each changes the computation, and that nothing else does."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from psgd import (
    PSGD,
    Affine,
    Dense,
    Diagonal,
    FiniteDifference,
    HessianVector,
    Joint,
    Kronecker,
    LimitedMemory,
    LowRank,
    MaxAbs,
    MaxDiag,
    PerTensor,
    Spectral,
    Whitening,
    c1,
    c2,
    c3,
)
from psgd.groups import Structure
from psgd.probes import Probe

from .cases import PROBES, STRUCTURES, TRIANGULAR, batch, probes, small_model, structures, train


def run(steps: int = 6, dtype=torch.float64, **options) -> list[Tensor]:
    model = small_model(dtype)
    options = {"lr": 0.05, **options}
    train(model, PSGD(model.parameters(), **options), 0, steps)
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Every option, with a value that is not the default.
OTHER = [
    {"lr": 0.06},
    {"preconditioner": Dense()},
    {"preconditioner": LimitedMemory(2)},
    {"preconditioner": LowRank(2)},
    {"preconditioner": Diagonal()},
    {"preconditioner": Kronecker(max_dense=5)},
    {"criterion": c1},
    {"criterion": c2},
    {"probe": FiniteDifference(std=1e-5)},
    {"probe": FiniteDifference(damping=0.1)},
    {"probe": HessianVector()},
    {"probe": HessianVector(damping=0.1)},
    {"probe": Whitening()},
    {"probe": Whitening(damping=0.1)},
    {"blocks": Joint()},
    {"precond_lr": 0.02},
    {"preconditioner": TRIANGULAR},
    {"preconditioner": TRIANGULAR, "normalize": MaxDiag()},
    {"preconditioner": TRIANGULAR, "normalize": Spectral()},
    {"preconditioner": Kronecker(max_skew=1)},
    {"precond_dtype": torch.bfloat16},
    {"probe": Whitening(of_average=False)},
    {"update_every": 3, "update_anneal": 5},
    {"update_every": 3},
    {"max_rms": 0.1},
    {"momentum": 0.5},
    {"weight_decay": 0.1},
    {"update_every": 2},
    {"max_norm": 0.1},
    {"seed": 1},
    {"maximize": True},
]


def test_every_option_changes_the_computation():
    results = [run(), *[run(**options) for options in OTHER]]
    for i, a in enumerate(results):
        for b in results[:i]:
            assert not same(a, b), OTHER[i - 1]


def test_same_options_give_the_same_bits():
    assert same(run(), run())


def test_defaults_are_spelled_out():
    explicit = run(
        preconditioner=Kronecker(max_dense=2048, max_skew=256, inverse_free=True),
        criterion=c3,
        probe=FiniteDifference(batched=False),
        blocks=PerTensor(),
        precond_lr=0.1,
        precond_boost=6.0,
        precond_dtype=torch.float64,
        normalize=None,
        momentum=0.9,
        weight_decay=0.0,
        update_every=1,
        update_anneal=0,
        max_rms=math.inf,
        max_norm=None,
        clip_outliers=3.0,
        clip_steps=2.0,
        adapt_lr=0.0,
        init="scaled",
        seed=0,
        maximize=False,
    )
    assert same(run(), explicit)


def test_defaults_of_whitening_are_for_everyday_training():
    everyday = {"momentum": 0.9, "max_rms": 1.1, "precond_lr": 0.3}
    assert same(run(probe=Whitening()), run(probe=Whitening(of_average=True), **everyday))


def test_defaults_of_triangular_factors():
    explicit = run(preconditioner=TRIANGULAR, precond_lr=0.05, precond_boost=3.0, normalize=MaxAbs())
    assert same(run(preconditioner=TRIANGULAR), explicit)


@pytest.mark.slow
@structures
@probes
def test_training_reduces_the_loss(structure, probe):
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.1, preconditioner=structure, probe=probe, max_norm=1.0)
    losses = train(model, optimizer, 0, 60)
    assert sum(losses[-20:]) / 20 < 0.4 * sum(losses[:3]) / 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)
def test_half_precision_parameters_are_trained_with_a_float32_q(dtype, probe):
    model = small_model(dtype)
    optimizer = PSGD(model.parameters(), lr=0.02, probe=probe, max_norm=1.0)
    losses = train(model, optimizer, 0, 200)
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert all(stack.like.dtype == torch.float32 for stack in optimizer.stacks)


def test_first_step_is_plain_sgd_on_the_fitted_p():
    """By hand, with a dense matrix: the algorithm of Section V.A."""
    theta = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    H = torch.tensor([[3.0, 1.0, 0.0], [1.0, -2.0, 0.5], [0.0, 0.5, 1.0]], dtype=torch.float64)
    paper = {"precond_lr": 0.01, "momentum": 0.0, "init": "identity", "clip_steps": math.inf}
    optimizer = PSGD([theta], lr=0.3, preconditioner=Dense(), probe=HessianVector(damping=0.0), **paper)
    start = theta.detach().clone()
    pairs = []
    probe = optimizer.probe

    class Recorder(HessianVector):
        def __call__(self, *args):
            evaluation = super().__call__(*args)
            pairs.append(evaluation.pairs[0])
            return evaluation

    optimizer.probe = Recorder(damping=0.0)
    assert probe is not optimizer.probe
    Q = torch.eye(3, dtype=torch.float64)
    for _ in range(4):
        optimizer.step(lambda: theta @ H @ theta / 2)
        dtheta, dgrad = pairs[-1]
        torch.testing.assert_close(dgrad, H @ dtheta)
        a, b = Q @ dgrad, torch.linalg.inv(Q).mT @ dtheta
        E = 2 * (torch.outer(a, a) - torch.outer(b, b)).triu()
        Q = Q - 0.01 / E.abs().max() * E @ Q
        start = start - 0.3 * Q.mT @ Q @ (H @ start)
        torch.testing.assert_close(theta.detach(), start, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(optimizer.state[theta]["Q0_full"], Q, rtol=1e-12, atol=1e-12)


def test_no_second_gradient_where_q_is_not_updated():
    calls = []
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, update_every=3)

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    counts = []
    for _ in range(7):
        calls.clear()
        before = optimizer.state[model[0].weight]["Q0_root"].clone()
        optimizer.step(closure)
        changed = not torch.equal(before, optimizer.state[model[0].weight]["Q0_root"])
        counts.append((len(calls), changed))
    assert counts == [(2, True), (1, False), (1, False)] * 2 + [(2, True)]


def test_hessian_vector_takes_one_gradient_where_q_is_not_updated():
    backward_calls = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            backward_calls.append(1)
            return grad * 2

    theta = torch.ones(3, requires_grad=True)
    optimizer = PSGD([theta], lr=0.01, probe=HessianVector(), update_every=2)
    counts = []
    for _ in range(4):
        backward_calls.clear()
        optimizer.step(lambda: (Double.apply(theta) ** 2).sum())
        counts.append(len(backward_calls))
    assert counts[1] == counts[3] == 1
    assert counts[0] == counts[2] > 1


def test_param_groups_have_their_own_numbers():
    def go(**second):
        model = small_model(torch.float64)
        groups = [
            {"params": model[0].parameters()},
            {"params": [*model[3].parameters(), *model[5].parameters()], **second},
        ]
        optimizer = PSGD(groups, lr=0.05, max_norm=10.0)
        q = []
        train(model, optimizer, 0, 4, lambda _: q.append(optimizer.state[model[3].weight]["Q0_root"].clone()))
        return model, q

    plain, _ = go()
    for name, value in [
        ("lr", 0.01),
        ("weight_decay", 0.5),
        ("precond_lr", 0.3),
        ("momentum", 0.5),
        ("max_norm", 0.01),
    ]:
        changed, _ = go(**{name: value})
        assert not torch.equal(plain[3].weight, changed[3].weight), name
    _, q = go(update_every=2)
    assert torch.equal(q[0], q[1])
    assert not torch.equal(q[1], q[2])
    frozen, _ = go(lr=0.0)
    assert torch.equal(frozen[3].weight, small_model(torch.float64)[3].weight)
    assert not torch.equal(frozen[0].weight, small_model(torch.float64)[0].weight)


def test_numbers_of_a_group_do_not_change_the_steps_of_another():
    """Also of blocks of one shape. The loss has a part for each group, so groups meet in the optimizer only."""
    numbers = [
        {"lr": 0.02, "precond_lr": 0.1},
        {"weight_decay": 0.1, "momentum": 0.0, "update_every": 2},
        {"max_rms": 0.001, "maximize": True},
    ]
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) / 6

    def go(probe: Probe, structure: Structure, groups: list[dict]) -> list[list[Tensor]]:
        layers = [[nn.Parameter(torch.eye(3).double() * (i + k)) for k in (1.0, 1.5)] for i in range(3)]
        each = [{"params": pair, **group} for pair, group in zip(layers, groups, strict=True)]
        optimizer = PSGD(each, lr=0.01, probe=probe, preconditioner=structure, momentum=0.9)
        assert [len(stack.blocks) for stack in optimizer.stacks] == [2, 2, 2]

        def loss_of() -> Tensor:
            return torch.stack([(x @ W - 1).square().mean() for pair in layers for W in pair]).sum()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss

        for _ in range(6):
            optimizer.step(loss_of if isinstance(probe, HessianVector) else closure)
        return [[W.detach() for W in pair] for pair in layers]

    for probe in (HessianVector(), Whitening(), Whitening(of_average=False)):
        for structure in (Kronecker(), Kronecker(inverse_free=False)):
            plain, told = go(probe, structure, [{}, {}, {}]), go(probe, structure, numbers)
            for i in range(3):
                assert not same(told[i], plain[i]), (probe, structure, i)
                one = go(probe, structure, [group if i == k else {} for k, group in enumerate(numbers)])
                for k in range(3):
                    assert same(one[k], told[k] if i == k else plain[k]), (probe, structure, i, k)


def test_lr_may_be_a_tensor():
    number, tensor = run(lr=0.05), run(lr=torch.tensor(0.05, dtype=torch.float64))
    for a, b in zip(number, tensor, strict=True):
        torch.testing.assert_close(a, b)
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=torch.tensor([0.0]), probe=Whitening())
    train(model, optimizer, 0, 2)
    assert same(list(model.parameters()), list(small_model().parameters()))


def test_schedulers_work():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.1, probe=Whitening(), momentum=0.5)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ]
    for scheduler in schedulers:
        seen = []
        for step in range(6):
            train(model, optimizer, step, step + 1)
            scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            seen.append(optimizer.param_groups[0]["lr"])
        assert len(set(seen)) > 1


def test_maximize_is_minimising_the_negative():
    for probe in PROBES:
        for criterion in (c3,) if probe.whitens else (c1, c2, c3):
            up = torch.tensor([0.5, -0.3], dtype=torch.float64, requires_grad=True)
            down = up.detach().clone().requires_grad_()
            for theta, sign, maximize in [(up, 1.0, True), (down, -1.0, False)]:
                optimizer = PSGD([theta], lr=0.1, probe=probe, criterion=criterion, maximize=maximize)

                def loss_of(theta=theta, sign=sign):
                    return sign * (theta.cos().sum() + theta[0] * theta[1])

                def closure(theta=theta, loss_of=loss_of):
                    theta.grad = None
                    loss = loss_of()
                    loss.backward()
                    return loss

                for _ in range(5):
                    optimizer.step(loss_of if isinstance(probe, HessianVector) else closure)
            assert torch.equal(up, down)


def test_momentum_is_an_unbiased_average():
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    unlimited = {"precond_lr": 1e-12, "max_rms": math.inf, "init": "identity"}
    optimizer = PSGD([theta], lr=1.0, probe=Whitening(), momentum=0.9, **unlimited)
    gradients = [torch.tensor([1.0, 2.0], dtype=torch.float64) * k for k in (1, 3, -2)]
    mean, weight, expected = torch.zeros(2, dtype=torch.float64), 0.0, torch.zeros(2, dtype=torch.float64)
    for g in gradients:
        theta.grad = g.clone()
        optimizer.step()
        mean, weight = 0.9 * mean + 0.1 * g, 0.9 * weight + 0.1
        expected = expected - mean / weight
    torch.testing.assert_close(theta.detach(), expected, rtol=1e-6, atol=1e-6)


def test_momentum_may_be_switched_on_later():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening())
    train(model, optimizer, 0, 2)
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, 2, 4)
    assert "momentum" in optimizer.state[model[0].weight]


def test_weight_decay_is_decoupled():
    theta = torch.tensor([2.0, -4.0], requires_grad=True)
    optimizer = PSGD([theta], lr=0.5, probe=Whitening(), weight_decay=0.1, max_norm=1e-6)
    theta.grad = torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(theta.detach(), torch.tensor([1.9, -3.8]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e15])
def test_max_norm_limits_the_length_of_the_whole_step(dtype, size):
    thetas = [torch.zeros(3, dtype=dtype, requires_grad=True), torch.zeros(2, 2, dtype=dtype, requires_grad=True)]
    optimizer = PSGD([{"params": [t]} for t in thetas], lr=1.0, probe=Whitening(), max_norm=0.25)
    for t in thetas:
        t.grad = torch.ones_like(t) * size
    optimizer.step()
    length = torch.cat([t.detach().flatten() for t in thetas]).norm().item()
    vanishes = size < torch.finfo(dtype).eps ** 2  # a gradient that says nothing of its size
    assert length == pytest.approx(size * 7**0.5 if vanishes else 0.25, rel=0.05)


def test_frozen_and_missing_gradients():
    model = small_model(torch.float64)
    model[0].requires_grad_(False)
    unused = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))  # stacked with the weight of the same shape
    optimizer = PSGD([*model.parameters(), unused], lr=0.05, momentum=0.5)
    train(model, optimizer, 0, 5)
    start = small_model(torch.float64)
    assert torch.equal(model[0].weight, start[0].weight)
    assert not torch.equal(model[3].weight, start[3].weight)
    assert torch.equal(unused, torch.ones(6, 6))
    assert torch.equal(optimizer.state[unused]["Q0_root"], torch.eye(6))
    model[0].requires_grad_(True)
    train(model, optimizer, 5, 6)
    assert not torch.equal(model[0].weight, start[0].weight)

    alone = small_model(torch.float64)
    alone[0].requires_grad_(False)
    train(alone, PSGD(alone.parameters(), lr=0.05, momentum=0.5), 0, 5)
    again = small_model(torch.float64)
    again[0].requires_grad_(False)
    other = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
    train(again, PSGD([*again.parameters(), other], lr=0.05, momentum=0.5), 0, 5)
    for a, b in zip(alone.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_to_do_is_no_error():
    theta = torch.ones(3, requires_grad=True)
    optimizer = PSGD([theta], probe=Whitening(), momentum=0.9, weight_decay=0.1, max_norm=1.0)
    optimizer.step()
    assert torch.equal(theta, torch.ones(3))
    assert int(optimizer.state[theta]["skipped"]) == 0


def complex_problem(probe, blocks=PerTensor(), structure=Kronecker()):
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(3, 2, generator=generator, dtype=torch.complex128).requires_grad_()
    b = torch.randn(3, generator=generator, dtype=torch.complex128).requires_grad_()
    x = torch.randn(2, 20, generator=generator, dtype=torch.complex128)
    y = torch.randn(3, 20, generator=generator, dtype=torch.complex128)
    optimizer = PSGD([W, b], lr=0.3, probe=probe, blocks=blocks, preconditioner=structure, max_norm=1.0)

    def loss_of():
        return (W @ x + b[:, None] - y).abs().square().mean()

    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    for _ in range(180):
        loss = optimizer.step(loss_of if isinstance(probe, HessianVector) else closure)
    A = torch.cat([x, torch.ones(1, 20, dtype=torch.complex128)])
    best = (y - y @ torch.linalg.pinv(A) @ A).abs().square().mean()
    return loss.item(), best.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "blocks"),
    [(FiniteDifference(), PerTensor()), (HessianVector(), Joint()), (HessianVector(), Affine())],
    ids=["differences, PerTensor", "products, Joint", "products, Affine"],
)
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_complex_parameters(probe, blocks, structure):
    loss, best = complex_problem(probe, blocks, structure)
    assert loss == pytest.approx(best, rel=1e-3)


def test_complex_pairs_of_both_probes_agree():
    z = torch.tensor([1.0 + 2.0j, -0.5 + 0.3j], dtype=torch.complex128, requires_grad=True)
    pairs = []
    for kind in (FiniteDifference, HessianVector):

        class Recorder(kind):
            def __call__(self, *args):
                evaluation = super().__call__(*args)
                pairs.append(evaluation.pairs[0])
                return evaluation

        optimizer = PSGD([z], lr=0.0, probe=Recorder())

        def loss_of():
            return (z[0] ** 3 * z[1].conj()).real + z.abs().square().sum() ** 2

        def closure():
            z.grad = None
            loss = loss_of()
            loss.backward()
            return loss

        optimizer.step(loss_of if kind is HessianVector else closure)
    (fd_theta, fd_grad), (hv_theta, hv_grad) = pairs
    assert fd_theta.shape == (2, 2)
    scale = (fd_theta / hv_theta).mean()
    torch.testing.assert_close(fd_theta / scale, hv_theta, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fd_grad / scale, hv_grad, rtol=1e-5, atol=1e-5)


def test_odd_tensors():
    """Of no dimension, of no element, not contiguous, channels last, of several dtypes, in one optimizer."""
    params = [
        torch.tensor(2.0, requires_grad=True),
        torch.tensor(3.0, requires_grad=True),
        torch.empty(0, requires_grad=True),
        torch.empty(3, 0, requires_grad=True),
        torch.randn(4, 3).t().requires_grad_(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(),
        torch.randn(3, dtype=torch.float64).requires_grad_(),
        torch.randn(3, dtype=torch.bfloat16).requires_grad_(),
        torch.randn(6)[::2].requires_grad_(),
        torch.randn(1, 1).requires_grad_(),
    ]
    for probe in PROBES:
        for structure in STRUCTURES:
            tensors = [p.detach().clone(memory_format=torch.preserve_format).requires_grad_() for p in params]
            optimizer = PSGD(tensors, lr=0.1, probe=probe, preconditioner=structure, momentum=0.5, max_norm=10.0)

            def loss_of(tensors=tensors):
                return sum((t.double() ** 2).sum() for t in tensors)

            def closure(optimizer=optimizer, loss_of=loss_of):
                optimizer.zero_grad()
                loss = loss_of()
                loss.backward()
                return loss

            strides = [t.stride() for t in tensors]
            first = loss_of().item()
            for _ in range(12):
                optimizer.step(loss_of if isinstance(probe, HessianVector) else closure)
            assert loss_of().item() < 0.5 * first
            assert [t.stride() for t in tensors] == strides


def test_channels_last_and_contiguous_take_the_same_steps():
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = torch.arange(120.0, dtype=torch.float64).reshape(2, 3, 4, 5).cos().to(memory_format=layout)
        weight.requires_grad_()
        optimizer = PSGD([weight], lr=0.1)

        def closure(weight=weight, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (weight**4).sum()
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)
        results.append(weight.detach().contiguous())
    torch.testing.assert_close(*results)


def test_storage_may_be_swapped_between_steps():
    model, other = small_model(torch.float64), small_model(torch.float64)
    optimizer = PSGD(model.parameters(), lr=0.05)
    train(model, optimizer, 0, 5)
    for p in model.parameters():
        p.data = p.data.clone()
    train(model, optimizer, 5, 10)
    train(other, PSGD(other.parameters(), lr=0.05), 0, 10)
    assert same(list(model.parameters()), list(other.parameters()))


def test_model_cast_after_the_optimizer_was_made():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.05)
    model.double()
    train(model, optimizer, 0, 3)
    assert all(stack.like.dtype == torch.float64 for stack in optimizer.stacks)


def test_default_dtype_does_not_matter():
    results = []
    models = [small_model(), small_model()]
    for default, model in zip((torch.float32, torch.float64), models, strict=True):
        torch.set_default_dtype(default)
        optimizer = PSGD(model.parameters(), lr=0.05, momentum=0.5, max_norm=0.5, weight_decay=0.1)
        train(model, optimizer, 0, 6)
        results.append([p.detach().clone() for p in model.parameters()])
    assert same(*results)


def test_hooks_and_zero_grad():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.05, probe=Whitening())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, 0, 2)
    assert calls == ["before", "after"] * 2
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_named_parameters_name_the_culprit():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    optimizer = PSGD(model.named_parameters(), probe=Whitening())
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 0 \(0.weight\) has a sparse gradient"):
        optimizer.step()
    weight, *others = model.named_parameters()
    groups = [{"params": others[:1]}, {"params": [*others[1:], weight]}]  # each group has names of its own
    optimizer = PSGD(groups, probe=Whitening())
    with pytest.raises(ValueError, match=r"parameter 2 \(0.weight\) has a sparse gradient"):
        optimizer.step()


def test_grad_scaler():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.05, probe=Whitening())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    plain = small_model()
    plain_optimizer = PSGD(plain.parameters(), lr=0.05, probe=Whitening())
    for step in range(6):
        train(plain, plain_optimizer, step, step + 1)
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(((model(x) - y) ** 2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    optimizer.zero_grad()
    scaler.scale(model(x).mean() * math.inf).backward()
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert same(list(model.parameters()), before)


def test_autocast_closure():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.1, max_norm=1.0, probe=FiniteDifference(0.09))
    losses = []
    for step in range(100):
        x, y = batch(step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)
def test_compiled_step_equals_eager_without_recompiling(probe):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = small_model(torch.float64)
        optimizer = PSGD(model.parameters(), lr=0.05, probe=probe, momentum=0.5, update_every=2)
        compiles: list[int] = []

        def count(_, compiles=compiles):
            compiles.append(sum(torch._dynamo.utils.counters["stats"].values()))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about what it imports and traces
            if compiled:
                optimizer.step = torch.compile(optimizer.step)
            train(model, optimizer, 0, 8, count)
        assert compiles[3] == compiles[-1]
        results.append([p.detach().clone() for p in model.parameters()])
    assert same(*results)


def test_no_warnings_and_no_traces():
    """Global generators, torch's flags, other optimizers and gradients are as if PSGD had not been there."""
    model, other = small_model(dropout=0.2), nn.Linear(2, 2)
    adam = torch.optim.Adam(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    adam.step()
    adam_state = copy.deepcopy(adam.state_dict())
    flags = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for probe in PROBES:
            optimizer = PSGD(model.parameters(), lr=0.01, probe=probe)
            torch.manual_seed(9)
            train(model, optimizer, 0, 3)
            state = torch.get_rng_state()
            torch.manual_seed(9)
            for _ in range(3):
                model(torch.ones(16, 4))  # dropout draws as often as in three ordinary steps
            assert torch.equal(state, torch.get_rng_state())
    assert flags == (torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    assert str(adam.state_dict()) == str(adam_state)


def test_gradients_are_left_as_the_closure_made_them():
    for probe in PROBES:
        model = small_model(torch.float64)
        optimizer = PSGD(model.parameters(), lr=0.0, probe=probe)
        mine = [torch.full_like(p, 7.0) for p in model.parameters()]
        for p, g in zip(model.parameters(), mine, strict=True):
            p.grad = g
        train(model, optimizer, 0, 1)
        if isinstance(probe, HessianVector):
            assert all(p.grad is g for p, g in zip(model.parameters(), mine, strict=True))
            continue
        expected = small_model(torch.float64)
        x, y = batch(0, torch.float64)
        ((expected(x) - y) ** 2).mean().backward()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_a_step_size_of_ones_own_has_no_boost():
    def boosts(**options) -> list[float]:
        optimizer = PSGD([{"params": [torch.zeros(2)]}, {"params": [torch.ones(2)], **options}], probe=Whitening())
        return [group["precond_boost"] for group in optimizer.param_groups]

    assert boosts() == [3.0, 3.0]
    assert boosts(precond_lr=0.3) == [3.0, 1.0]
    assert boosts(precond_lr=0.3, precond_boost=2.0) == [3.0, 2.0]
    assert PSGD([torch.zeros(2)], probe=Whitening(), precond_lr=0.2).param_groups[0]["precond_boost"] == 1.0


def test_repr_says_what_there_is():
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.05)
    text = repr(optimizer)
    assert text.startswith(
        "PSGD(Kronecker(max_dense=2048, max_skew=256, inverse_free=True), c3, FiniteDifference(), PerTensor(); lr=0.05,"
    )
    assert "  2 × (6,): symmetric 6, float32 on cpu, 376 B" in text
    assert "  (6, 4): symmetric 6 ⊗ symmetric 4, float32 on cpu, 324 B" in text
    assert "init=" not in text  # what is usual goes without saying
    assert "init='identity'; lr=" in repr(PSGD(model.parameters(), init="identity"))


@pytest.mark.slow
@settings(max_examples=15)
@given(
    n=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    structure=st.sampled_from(STRUCTURES),
    probe=st.sampled_from(PROBES),
)
def test_quadratics_of_any_kind_are_descended(n, seed, structure, probe):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, generator=generator, dtype=torch.float64)
    H = A @ A.mT + 0.1 * torch.eye(n, dtype=torch.float64)
    theta = torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = PSGD([theta], lr=0.05, preconditioner=structure, probe=probe, max_norm=1.0)

    def loss_of():
        return theta @ H @ theta / 2

    def closure():
        theta.grad = None
        loss = loss_of()
        loss.backward()
        return loss

    first = loss_of().item()
    for _ in range(200):
        optimizer.step(loss_of if isinstance(probe, HessianVector) else closure)
    assert loss_of().item() < 0.5 * first


@structures
@probes
def test_the_default_device_does_not_matter(structure, probe):
    """Not even one where there are no numbers."""

    def trained(device: str) -> list[torch.Tensor]:
        model, again = small_model(), small_model()
        data = [batch(step) for step in range(2)]
        options = {"lr": 0.05, "momentum": 0.5, "preconditioner": structure, "probe": probe, "max_norm": 1.0}
        with torch.device(device):
            optimizer = PSGD(model.parameters(), **options)
            optimizer.load_state_dict(PSGD(again.parameters(), **options).state_dict())
            assert "PSGD" in repr(copy.deepcopy(optimizer))
            for x, y in data:

                def loss_of(x=x, y=y):
                    return ((model(x) - y) ** 2).mean()

                def closure(loss_of=loss_of):
                    optimizer.zero_grad()
                    loss = loss_of()
                    loss.backward()
                    return loss

                optimizer.step(loss_of if isinstance(probe, HessianVector) else closure)
        return list(model.parameters())

    assert all(map(torch.equal, trained("cpu"), trained("meta")))


def test_where_all_parameters_are_empty_there_is_nothing_to_do():
    empty = torch.zeros(0, 3, requires_grad=True)
    optimizer = PSGD([empty], lr=0.1, probe=Whitening())
    for grad in (None, torch.zeros(0, 3)):
        empty.grad = grad
        optimizer.step()
    assert int(optimizer.state[empty]["step"]) == 2
