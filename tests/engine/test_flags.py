"""What a step does when something goes wrong: all of it or nothing."""

from __future__ import annotations

import copy
import gc
import math
import resource
import sys
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from psgd import PSGD, Dense, FiniteDifference, HessianVector, Joint, Kronecker, Whitening, c3
from psgd.engine.flags import agree
from psgd.probes.noise import Noise
from tests.state.test_store import bits

from ..cases import PROBES, STRUCTURES, TRIANGULAR, probes, small_model, structures, train
from ..interrupt import Break
from ..peak import Peak


def steps(probe, optimizer, loss_of):
    """One step by the closure that the probe wants."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return optimizer.step(loss_of if isinstance(probe, HessianVector) else closure)


def everything(model: nn.Module, optimizer: PSGD) -> list[Tensor]:
    """Parameters, momentum and Q, but not the counters."""
    tensors = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        tensors += [v.clone() for k, v in optimizer.state[p].items() if k not in ("step", "skipped")]
    return tensors


@pytest.mark.slow
@structures
@probes
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(structure, probe):
    check_skipped(structure, probe, math.nan)


@probes
def test_nor_does_a_step_that_is_infinite(probe):
    check_skipped(Kronecker(), probe, -math.inf)


def check_skipped(structure, probe, bad):
    model = small_model()
    optimizer = PSGD(
        model.parameters(), lr=0.05, preconditioner=structure, probe=probe, momentum=0.5, weight_decay=0.1, max_norm=1.0
    )
    train(model, optimizer, 0, 3)
    before = everything(model, optimizer)
    for _ in range(3):
        steps(probe, optimizer, lambda: model(torch.ones(2, 4)).mean() * bad)
    for a, b in zip(everything(model, optimizer), before, strict=True):
        assert torch.equal(a, b)
    assert all(int(optimizer.state[p]["skipped"]) == 3 for p in model.parameters())
    assert all(int(optimizer.state[p]["step"]) == 6 for p in model.parameters())
    losses = train(model, optimizer, 6, 30)
    assert sum(losses[-10:]) < sum(losses[:10])
    assert int(optimizer.state[model[0].weight]["skipped"]) == 3


def test_one_bad_element_is_enough():
    model = small_model()
    optimizer = PSGD(model.parameters(), probe=Whitening())
    train(model, optimizer, 0, 2)
    model[3].weight.grad[2, 3] = math.nan
    before = everything(model, optimizer)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), before, strict=True))


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.float16, np.asarray], ids=lambda k: k.__name__)
@pytest.mark.parametrize("probe", [FiniteDifference(), Whitening()], ids=lambda p: type(p).__name__)
def test_a_loss_that_is_no_tensor_counts_too(kind, probe):
    theta = torch.ones(2, requires_grad=True)
    optimizer = PSGD([theta], lr=0.1, probe=probe)

    def closure(value):
        theta.grad = None
        (theta**2).sum().backward()
        return value

    optimizer.step(lambda: closure(kind(1.0)))
    before = theta.detach().clone()
    assert not torch.equal(theta, torch.ones(2))
    for k, bad in enumerate((kind(math.nan), kind(math.inf), 10**400), 1):
        optimizer.step(partial(closure, bad))
        assert torch.equal(theta, before)
        assert int(optimizer.state[theta]["skipped"]) == k
    optimizer.error_if_nonfinite = True
    for bad in (kind(math.nan), 10**400):
        with pytest.raises(FloatingPointError, match="the loss is"):
            optimizer.step(partial(closure, bad))


@probes
def test_error_if_nonfinite_raises_and_changes_nothing(probe):
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.05, probe=probe, error_if_nonfinite=True)
    train(model, optimizer, 0, 3)
    before, grads = bits(model, optimizer), [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in grads]

    def closure():
        loss = model(torch.ones(2, 4)).mean() * math.nan
        if not isinstance(probe, HessianVector):
            loss.backward()
        return loss

    with pytest.raises(FloatingPointError, match="step 3"):
        optimizer.step(closure)
    assert bits(model, optimizer) == before
    for p, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert p.grad is grad
        assert (grad is None and value is None) or torch.equal(grad, value)


def test_a_step_is_taken_if_all_flags_are_true():
    yes, no, cpu = torch.tensor(True), torch.tensor(False), torch.device("cpu")
    for flags in ([], [yes], [yes, yes], [no], [yes, no], [no, yes]):
        assert bool(agree(flags, [cpu])[cpu]) == all(flags)


def test_a_pair_that_is_not_finite_leaves_q_alone():
    """The gradient is fine, the one beside it is not: the parameters move, by the old Q."""
    theta = torch.tensor([1.0, 2.0], requires_grad=True)
    optimizer = PSGD([theta], lr=0.1)
    calls = []

    def closure():
        calls.append(1)
        theta.grad = torch.ones(2) if len(calls) % 2 else torch.tensor([math.inf, 1.0])
        return 0.0

    for i in range(5):
        optimizer.step(closure)
        assert torch.equal(optimizer.state[theta]["Q0_root"], torch.eye(2))
        torch.testing.assert_close(theta.detach(), torch.tensor([1.0, 2.0]) - 0.1 * (i + 1))
    assert int(optimizer.state[theta]["skipped"]) == 0


def test_a_step_that_overflows_is_skipped_and_counted():
    """The gradient is finite, what the step size makes of it is not; so is a length whose square is not."""
    theta = torch.ones(2, requires_grad=True)
    optimizer = PSGD([theta], lr=100.0, probe=Whitening())
    theta.grad = torch.full((2,), 1e37)
    optimizer.step()
    wide = torch.ones(2, dtype=torch.float64, requires_grad=True)
    other = PSGD([wide], lr=0.1, probe=Whitening(), max_norm=1.0)
    wide.grad = torch.full((2,), 1e200, dtype=torch.float64)
    other.step()
    for p, o in ((theta, optimizer), (wide, other)):
        assert torch.equal(p, torch.ones(2, dtype=p.dtype))
        assert int(o.state[p]["skipped"]) == 1


def test_a_normalisation_that_is_far_too_small_leaves_q_finite():
    model = small_model()
    normalize = {"preconditioner": TRIANGULAR, "normalize": lambda t: t.max_abs() * 1e-38}
    optimizer = PSGD(model.parameters(), lr=1e-3, **normalize)
    train(model, optimizer, 0, 10)
    assert all(torch.isfinite(buffer).all() for stack in optimizer.stacks for buffer in stack.buffers().values())


SIZES = [1e30, 1e-20, 1e-42, 0.0]


#: the largest also along one direction only
EXTREMES = [*((size, False) for size in SIZES), (1e30, True)]
#: every structure with every extreme, and both with every probe: two of three, which take turns
TURNS = [
    (structure, probe, *extreme)
    for i, structure in enumerate(STRUCTURES)
    for j, extreme in enumerate(EXTREMES)
    for k, probe in enumerate(PROBES)
    if (i + j + k) % len(PROBES)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:PSGD skipped:psgd.PSGDWarning")
@pytest.mark.parametrize(("structure", "probe", "size", "rank_one"), TURNS, ids=str)
def test_extreme_gradients_do_no_lasting_harm(structure, probe, size, rank_one):
    """A while of gradients far from one, then an ordinary problem: it is solved as by a new optimizer."""
    # Whitened steps do not become smaller near the goal.
    near = 0.05 if isinstance(probe, Whitening) else 1e-3
    limit = 3 * loss_after_extremes(structure, probe) + near
    long = structure in (Dense(), Kronecker()) and size in (1e30, 0.0) and not rank_one
    assert loss_after_extremes(structure, probe, 200 if long else 50, size, rank_one) < limit


@cache
def loss_after_extremes(structure, probe, first: int = 0, size: float = 1.0, rank_one: bool = False) -> float:
    theta = torch.zeros(2, 3, requires_grad=True)
    goal = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]])
    direction = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 0.0]])

    def extreme():
        offset = (theta * direction).sum() - 1 if rank_one else (theta - goal).flatten()
        return (offset**2).sum() * size

    def ordinary():
        return ((theta - goal) ** 2).sum() / 2

    optimizer = PSGD([theta], lr=0.1, preconditioner=structure, probe=probe, momentum=0.0)
    for _ in range(first):
        steps(probe, optimizer, extreme)
        theta.data.zero_()  # what the parameters do here is not the point
    Q = torch.cat([v.flatten() for k, v in optimizer.state[theta].items() if k.startswith("Q")])
    assert torch.isfinite(Q).all()
    assert Q.abs().max() < 100
    for _ in range(100 if size == 1e-20 else 60):  # after tiny gradients, ordinary ones are outliers at first
        loss = steps(probe, optimizer, ordinary)
    return loss.item()


@structures
@probes
def test_zero_gradients_move_nothing(structure, probe):
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.5, preconditioner=structure, probe=probe, momentum=0.0)
    before = everything(model, optimizer)
    for _ in range(8):
        steps(probe, optimizer, lambda: model(torch.ones(2, 4)).mean() * 0.0)
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("probe", [FiniteDifference(), HessianVector()], ids=lambda p: type(p).__name__)
def test_a_hessian_of_condition_1e8_is_preconditioned(probe):
    generator = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))
    eigenvalues = torch.logspace(-4, 4, 6, dtype=torch.float64)
    H = U * eigenvalues @ U.mT
    theta = torch.ones(6, dtype=torch.float64, requires_grad=True)
    optimizer = PSGD([theta], lr=0.5, preconditioner=Dense(), probe=probe, max_norm=1.0)
    count = 4000
    for _ in range(count):
        loss = steps(probe, optimizer, lambda: theta @ H @ theta / 2)
    # Plain SGD at the largest stable step size, in closed form.
    start = U.mT @ torch.ones(6, dtype=torch.float64)
    plain = (eigenvalues * (start * (1 - eigenvalues / eigenvalues.max()) ** count) ** 2).sum() / 2
    assert loss.item() < 1e-2 * plain.item()
    assert optimizer.state[theta]["Q0_full"].abs().max() < 1e3
    # And at full speed afterwards, on a problem that is easy.
    theta.data.fill_(1.0)
    for _ in range(600):
        loss = steps(probe, optimizer, lambda: theta @ theta / 2)
    assert loss.item() < 1e-10


@probes
@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_closure_leaves_everything_as_it_was(probe, call, error):
    model = small_model(dropout=0.3)
    optimizer = PSGD(model.parameters(), lr=0.05, probe=probe, momentum=0.5)
    train(model, optimizer, 0, 3)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    grads = [p.grad for p in model.parameters()]
    before = bits(model, optimizer)
    calls = []

    def closure():
        optimizer.zero_grad(set_to_none=False)
        loss = model(torch.ones(2, 4)).mean()
        if not isinstance(probe, HessianVector):
            loss.backward()
        if len(calls) == (call if isinstance(probe, FiniteDifference) else 0):
            raise error("now")
        calls.append(1)
        return loss

    with pytest.raises(error, match="now"):
        optimizer.step(closure)
    assert bits(model, optimizer) == before
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, torch.full_like(p, 3.0))


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)
def test_an_interrupt_anywhere_finds_all_parameters_moved_or_none(probe):
    model = small_model()
    optimizer = PSGD(model.parameters(), lr=0.05, probe=probe, momentum=0.5, weight_decay=0.1, max_norm=0.5)
    train(model, optimizer, 0, 3)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    start = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 3, 4)
    moved = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 4, 6)
    final = bits(model, optimizer)

    at = 1
    outcomes = set()
    while True:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        try:
            with Break(at):
                train(model, optimizer, 3, 4)
            break
        except KeyboardInterrupt:
            now = [p.detach().clone() for p in model.parameters()]
            unmoved = all(torch.equal(a, b) for a, b in zip(now, start, strict=True))
            assert unmoved or all(torch.equal(a, b) for a, b in zip(now, moved, strict=True)), at
            outcomes.add(unmoved)
        at += 1 if at < 40 else 13
    assert at > 100
    # The last state dict continues to the bit.
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, 3, 6)
    assert bits(model, optimizer) == final
    assert True in outcomes


def test_peak_is_measured_right():
    x = torch.zeros(1000)
    with Peak() as peak:
        y = x + 1  # 4000 bytes
        y.add_(1)
        z = y.view(10, 100) * 2  # 8000
        del y
        z = z + z  # 8000
        x.mul_(2)
    assert peak.peak == 8000
    assert peak.bytes == 4000
    del z
    assert peak.bytes == 0


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("sizes", [(300, 300), (784, 300, 10), (64, 64, 64, 64, 64)], ids=str)
@pytest.mark.parametrize("structure", [TRIANGULAR, Kronecker()], ids=str)
def test_peak_memory_of_a_step(probe, sizes, structure):
    """Beyond what there was, which is parameters, gradients and state: five times the parameters at most.

    Inverse-free factors take up to twice their own size on top.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(i, o) for i, o in pairwise(sizes)]
    model = nn.Sequential(*layers)
    size = sum(p.nbytes for p in model.parameters())
    optimizer = PSGD(model.parameters(), lr=0.01, probe=probe, preconditioner=structure, momentum=0.0)
    x = torch.randn(2, sizes[0])

    def loss_of():
        return model(x).square().mean()

    steps(probe, optimizer, loss_of)
    steps(probe, optimizer, loss_of)
    if isinstance(probe, Whitening):
        loss_of().backward()
    with Peak(*[p.grad for p in model.parameters() if p.grad is not None]) as whole:
        if isinstance(probe, Whitening):
            optimizer.step()
        else:
            steps(probe, optimizer, loss_of)
    # HessianVector writes no `.grad`: the gradients themselves, once the parameters, come on top.
    times = 6 if isinstance(probe, HessianVector) else 5
    # Python 3.10 keeps the arguments of a call until it returns, so a pair that is handed over is freed later.
    times += sys.version_info < (3, 11)
    activations = 4 * 2 * sum(sizes) * 4
    factors = sum(stack.group.nbytes() for stack in optimizer.stacks)
    allowed = times * size + activations + (2 * factors if structure.own_normalization else 0)
    assert whole.peak <= allowed, (whole.peak / size, factors / size)


@pytest.mark.slow
def test_no_leak_over_thousands_of_steps():
    theta = torch.randn(3, 2, requires_grad=True)
    optimizer = PSGD([theta], lr=0.01, probe=Whitening(), momentum=0.9, max_norm=1.0)

    def go(count):
        for _ in range(count):
            theta.grad = theta.detach() * 2
            optimizer.step()

    go(500)
    gc.collect()
    objects = len(gc.get_objects())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    go(2500)
    gc.collect()
    assert len(gc.get_objects()) < objects + 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20_000  # KiB


def test_skipping_needs_no_look_at_the_device(monkeypatch):
    """On the device `meta` a tensor has no value: any look at one raises. (It has no random generator either.)"""
    monkeypatch.setattr(Noise, "__call__", lambda self, like, seed, position: torch.empty_like(like))
    theta = torch.zeros(4, 3, device="meta", requires_grad=True)
    bias = torch.zeros(4, device="meta", requires_grad=True)
    for structure in STRUCTURES:
        for blocks in (Joint(), None):
            options = {} if blocks is None else {"blocks": blocks}
            optimizer = PSGD(
                [theta, bias],
                probe=Whitening(),
                preconditioner=structure,
                momentum=0.9,
                max_norm=1.0,
                weight_decay=0.1,
                criterion=c3,
                **options,
            )
            for _ in range(3):
                theta.grad, bias.grad = torch.zeros_like(theta), torch.zeros_like(bias)
                optimizer.step()


def test_kronecker_is_the_default():
    assert isinstance(PSGD([torch.ones(2, requires_grad=True)]).preconditioner, Kronecker)
