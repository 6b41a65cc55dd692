"""Laws of the steps of ``Q``."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psgd import MaxAbs, MaxDiag, Spectral, Whitening, c1, c2, c3
from psgd.criteria import Criterion
from psgd.groups import Factor, Group
from psgd.groups.base import LeftFactor
from psgd.normalize import Normalization
from psgd.tangent import Tangent, unfold

from ..cases import CRITERIA, NORMALIZATIONS, Case, scale_
from .suite import law
from .test_maps import EXACT

#: every criterion and every normalization once: a step does not know which of the former made its tangent
CHOICES = [(c1, MaxDiag()), (c2, Spectral()), (c3, MaxAbs())]


def small(case: Case) -> bool:
    return max(case.shape) < 100


def simple(case: Case) -> bool:
    """A vector and a matrix of each structure: for laws that many steps have to show."""
    return case.shape in [(5,), (6,), (7,), (4, 3)]


def possible(*elements: Tensor) -> Tensor:
    """Places where some elements of a structure have numbers."""
    return torch.stack([element != 0 for element in elements]).any(0)


def places(case: Case, axis: int) -> Tensor:
    """Places where a factor has numbers."""
    return possible(*(case.group(seed=seed).factors[axis].dense()[0] for seed in (7, 8)))


def value(criterion: Criterion, Q: Tensor, dtheta: Tensor, dgrad: Tensor) -> Tensor:
    """What a criterion descends, from a dense matrix and a single pair."""
    P, v, g = Q.mT @ Q, dtheta.flatten(), dgrad.flatten()
    if criterion is c1:
        return ((g - torch.linalg.solve(P, v)) ** 2).sum()
    if criterion is c2:
        return ((P @ g - v) ** 2).sum()
    return g @ P @ g + v @ torch.linalg.solve(P, v)


def matrix(group: Group, v: Tensor, axis: int) -> Tensor:
    """A single block as a matrix, with one axis as its rows."""
    return unfold(v.reshape(1, *group.dims), axis)[0]


def copies(group: Group) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in group.buffers().items()}


def moved(new: Tensor, old: Tensor) -> Tensor:
    """What a short step did to a factor, but for the power of two that balancing multiplied it with."""
    exponent = (torch.linalg.matrix_norm(new) / torch.linalg.matrix_norm(old)).log2().round()
    return new / 2**exponent - old


def straighten_(group: Group) -> None:
    """Make near-symmetric factors symmetric, with the same ``P``: steps turn them there."""
    for factor in group.factors:
        if not isinstance(factor, LeftFactor):
            eigenvalues, vectors = torch.linalg.eigh(factor.P())
            factor.dense().copy_(vectors * eigenvalues.sqrt()[:, None] @ vectors.mT)


# The group.


@law(where=lambda case: case.one_group)
def test_group_is_closed_under_products(case: Case):
    """The product of two elements is an element: zero where the structure has no number, positive on the diagonal."""
    for p, q in zip(case.group(seed=1).factors, case.group(seed=2).factors, strict=True):
        product = p.dense() @ q.dense()
        assert torch.all(product[~possible(p.dense(), q.dense())] == 0)
        assert torch.all(product.diagonal(dim1=1, dim2=2) > 0)


@law()
def test_group_is_closed_under_descent(case: Case):
    """A step keeps every zero that belongs to the structure, and a positive diagonal where that is promised."""
    for normalize in NORMALIZATIONS:
        group, (x, y) = case.group(), case.vectors(2)
        zeros = [factor.dense() == 0 for factor in case.group(seed=7).factors]
        group.descend_(Tangent(x, y), 0.5, normalize)
        for factor, zero in zip(group.factors, zeros, strict=True):
            assert torch.all(factor.dense()[zero] == 0)
            assert torch.all(factor.diagonal() > 0)


# The direction of a step.


@law(where=lambda case: case.one_group and len(case.shape) < 4 and max(case.shape) < 200, criterion=CRITERIA)
def test_descent_is_along_the_projected_gradient_of_autograd(case: Case, criterion: Criterion):
    """For every factor, ``∂c(Q_i + E Q_i)/∂E`` at E = 0, restricted to the group, is what a step moves along."""
    group, (dtheta, dgrad) = case.group(), case.vectors(2)
    tangent = criterion(group, dtheta, dgrad)
    factors = [factor.dense()[0].clone() for factor in group.factors]
    dims = [1, *group.dims]
    folded = Tangent(tangent.x.reshape(dims), tangent.y.reshape(dims))
    for axis, factor in enumerate(group.factors):
        assert isinstance(factor, LeftFactor)
        n = factors[axis].shape[0]
        E = torch.zeros(n, n, dtype=torch.float64, requires_grad=True)
        Q = product([f + E @ f if i == axis else f for i, f in enumerate(factors)])
        (gradient,) = torch.autograd.grad(value(criterion, Q, dtheta, dgrad), E)
        free = places(case, axis)
        expected = gradient * free

        # A step so short that it is linear in the step size, with the norm known: what it moved is μ ∇E Q.
        before = factor.dense()[0].clone()
        projected = factor.project(folded.unfold(axis))
        torch.testing.assert_close(
            2 * projected.diagonal()[0], expected.diagonal(), rtol=1e-9, atol=1e-9 * expected.abs().max().item()
        )
        step = torch.full((1, 1, 1), 1e-3, dtype=torch.float64)
        factor.descend_off_diagonal_(projected, step, torch.ones_like(step))
        if free.sum() > n:  # a diagonal factor has nothing else
            off = ~torch.eye(n, dtype=torch.bool)
            ours, theirs = (2 * (before - factor.dense()[0]) / 1e-3)[off], (expected @ before)[off]
            assert torch.linalg.vector_norm(ours - theirs) <= 1e-9 * torch.linalg.vector_norm(expected @ before)


def product(factors: list[Tensor]) -> Tensor:
    Q = torch.ones(1, 1, dtype=torch.float64)
    for factor in factors:
        Q = torch.kron(Q, factor)
    return Q


@law(where=lambda case: case.one_group, choice=CHOICES)
def test_one_step_is_the_formula_of_the_paper(case: Case, choice: tuple[Criterion, Normalization]):
    """``Q ← Q − μ₀ / ‖∇E‖ · ∇E Q`` for every factor, written with dense matrices."""
    criterion, normalize = choice
    group, (dtheta, dgrad) = case.group(), case.vectors(2)
    tangent = criterion(group, dtheta, dgrad)
    expected = []
    for axis, factor in enumerate(group.factors):
        x, y = matrix(group, tangent.x, axis), matrix(group, tangent.y, axis)
        S = x @ y.mT + y @ x.mT
        free = places(case, axis)
        E = 2 * S * free
        norm = {
            "MaxAbs": E.abs().max(),
            "MaxDiag": E.diagonal().abs().max(),
            "Spectral": 2 * torch.linalg.matrix_norm(S, 2) if free.sum() > len(S) else E.abs().max(),
        }[type(normalize).__name__]
        Q = factor.dense()[0].clone()
        expected.append((norm, E @ Q, Q))
    group.descend_(tangent, 0.05, normalize)
    scales = 1.0
    for factor, (norm, EQ, Q) in zip(group.factors, expected, strict=True):
        new = factor.dense()[0]
        goal = Q - 0.05 / norm * EQ
        scale = (new.diagonal() / goal.diagonal()).log2().mean()  # balancing moves powers of two between factors
        approximate = type(normalize).__name__ == "Spectral" and len(group.dims) > 1
        if approximate:  # the estimate of the norm is between half of it and all of it
            step, right = torch.linalg.matrix_norm(Q - new / 2 ** scale.round()), torch.linalg.matrix_norm(Q - goal)
            assert right * 0.999 <= step <= right * 2
        else:
            assert abs(scale - scale.round()) < 1e-9
            torch.testing.assert_close(new / 2 ** scale.round(), goal, rtol=1e-9, atol=1e-9)
            scales = scales * 2 ** scale.round()
    assert scales == 1.0


@law(where=lambda case: not case.left and small(case), criterion=CRITERIA)
def test_in_its_own_coordinates_a_step_is_along_the_tangent(case: Case, criterion: Criterion):
    """``P_i ← P_i − 2 lr / L · Q_i S_i Q_i`` to first order, with an ``L`` that bounds ``S_i``, for each factor.

    ``S`` is the tangent for ``a = P δg`` and ``b = δθ``, as far as the factor can follow it. ``Q_i`` itself is turned
    besides, which its ``P_i`` does not see.
    """
    lr = 1e-7
    group, (dtheta, dgrad) = case.group(), case.vectors(2)
    straighten_(group)
    before = [factor.dense()[0].clone() for factor in group.factors]
    tangent, a = criterion(group, dtheta, dgrad), group.precondition(dgrad)
    pairs = [tuple(matrix(group, v, axis) for v in (tangent.x, tangent.y, a, dtheta)) for axis in range(len(before))]
    group.descend_(criterion(group, dtheta, dgrad), lr)
    for factor, Q, (x, y, a, b) in zip(group.factors, before, pairs, strict=True):
        S, grams = x @ y.mT + y @ x.mT, [a @ a.mT, b @ b.mT]
        if isinstance(factor, LeftFactor):  # a diagonal one
            S, *grams = (M.diagonal().diag() for M in (S, *grams))
        if criterion is c3:
            torch.testing.assert_close(S, grams[0] - grams[1], **EXACT)
        else:
            grams = [S]
        step = moved(factor.dense()[0], Q) / lr
        ours, right = step.mT @ Q + Q.mT @ step, -2 * Q @ S @ Q
        per_L = (ours * right).sum() / (right * right).sum()
        torch.testing.assert_close(ours, per_L * right, rtol=1e-4, atol=2e-6 * ours.abs().max().item())
        L = sum(torch.linalg.matrix_norm(gram, 2) for gram in grams)
        columns = sum(torch.linalg.vector_norm(gram, dim=0).amax() for gram in grams)
        assert columns * (1 - 1e-6) <= 1 / per_L <= L * (1 + 1e-6)


@law(where=small, criterion=CRITERIA)
def test_a_short_step_descends_the_criterion(case: Case, criterion: Criterion):
    """The derivative of the criterion along the step of each factor, by autograd, is negative.

    The other factors are identities. Where they are not, they weigh in coordinates ``dQ = Q^½ E Q^1.5`` the columns
    that a factor sees: its step need not descend for each single pair.
    """
    lr = 1e-7
    for axis in range(len(case.template.dims)):
        random, (dtheta, dgrad) = case.group(), case.vectors(2)
        straighten_(random)
        group = case.structure.init(case.shape, dtype=torch.float64, device="cpu")
        for new, old in zip(
            group.factors[axis].buffers().values(), random.factors[axis].buffers().values(), strict=True
        ):
            new.copy_(old)
        before = [factor.dense()[0].clone() for factor in group.factors]
        group.descend_(criterion(group, dtheta, dgrad), lr)
        direction = moved(group.factors[axis].dense()[0], before[axis]) / lr
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        Q = product([f + t * direction if i == axis else f for i, f in enumerate(before)])
        start = value(criterion, Q, dtheta, dgrad)
        (derivative,) = torch.autograd.grad(start, t)
        assert derivative < -1e-3 * start.detach() * torch.linalg.matrix_norm(direction) ** 2


@law(scale=[1e-12, 1e12])
def test_only_the_ratio_of_gradient_and_parameter_counts(case: Case, scale: float):
    """``(c δθ, c δg)`` gives the step of ``(δθ, δg)``."""
    for criterion in CRITERIA:
        plain, scaled, (dtheta, dgrad) = case.group(), case.group(), case.vectors(2)
        plain.descend_(criterion(plain, dtheta, dgrad), 0.3)
        scaled.descend_(criterion(scaled, scale * dtheta, scale * dgrad), 0.3)
        torch.testing.assert_close(scaled.dense(), plain.dense(), **EXACT)


@law(where=simple, criterion=CRITERIA)
def test_equivariance(case: Case, criterion: Criterion):
    """With H scaled by c and Q by c^(−1/2), the trajectory of PH is the same up to rounding."""
    n = case.vectors()[0].numel()
    for scale in (1e-12, 1e6):
        generator = torch.Generator().manual_seed(3)
        A = torch.randn(n, n, generator=generator, dtype=torch.float64)
        H = A @ A.mT / n + 0.5 * torch.eye(n, dtype=torch.float64)
        plain, scaled = case.group(), case.group()
        scale_(scaled.factors[0], scale**-0.5)
        for _ in range(30):
            dtheta = torch.randn(1, *case.shape, generator=generator, dtype=torch.float64)
            # The secant criteria compare δθ with Pδg: their trajectories are the same where both sides scale alike.
            shrunk = dtheta * scale**-0.5
            dgrad, big = ((v.reshape(1, n) @ M).reshape(dtheta.shape) for v, M in [(dtheta, H), (shrunk, H * scale)])
            plain.descend_(criterion(plain, dtheta, dgrad), 0.1, MaxAbs())
            scaled.descend_(criterion(scaled, shrunk, big), 0.1, MaxAbs())
        ours, theirs = (Q.mT @ Q @ M for Q, M in [(plain.dense()[0], H), (scaled.dense()[0], H * scale)])
        torch.testing.assert_close(theirs, ours, rtol=1e-8, atol=1e-8)


# Who is moved, and what else is not.


@law(choice=CHOICES)
def test_stacked_equals_one_by_one(case: Case, choice: tuple[Criterion, Normalization]):
    criterion, normalize = choice
    stack, (dtheta, dgrad) = case.group(batch=3), case.vectors(2, batch=3)
    alone = [
        stack.bind({name: buffer[i : i + 1].clone() for name, buffer in stack.buffers().items()}) for i in range(3)
    ]
    rates = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    stack.descend_(criterion(stack, dtheta, dgrad), rates, normalize)
    for i, group in enumerate(alone):
        one = slice(i, i + 1)
        group.descend_(criterion(group, dtheta[one], dgrad[one]), rates[i].item(), normalize)
        torch.testing.assert_close(group.dense()[0], stack.dense()[i], **EXACT)


def with_(v: Tensor, bad: float) -> Tensor:
    """The same with one element of the first block replaced, or with all of them, where that is by zero."""
    v = v.clone()
    first = v[0].view(-1)
    (first if bad == 0 else first[:1]).fill_(bad)
    return v


@law(bad=[float("nan"), float("inf"), 0.0])
def test_a_useless_tangent_changes_no_bit(case: Case, bad: float):
    """Neither does one half of it; the other block of the stack is fitted as ever."""
    for criterion in (c2, c3):
        group, (x, y) = case.group(batch=2), case.vectors(2, batch=2)
        is_difference = criterion(group, x, y).is_difference
        group.descend_(Tangent(x.clone(), y.clone(), is_difference), 0.1, MaxAbs())  # balanced from here on
        both = (with_(x, bad), with_(y, bad))
        halves = [both] if is_difference else [both, (both[0], y), (x, both[1])]
        for half in halves:
            before = copies(group)
            group.descend_(Tangent(*(v.clone() for v in half), is_difference), 0.1, MaxAbs())
            for name, buffer in group.buffers().items():
                assert torch.equal(buffer[0], before[name][0])
            assert any(not torch.equal(buffer[1], before[name][1]) for name, buffer in group.buffers().items())


@law()
def test_blocks_that_are_not_usable_keep_every_bit(case: Case):
    group, (dtheta, dgrad) = case.group(batch=2), case.vectors(2, batch=2)
    group.descend_(c3(group, dtheta, dgrad), 0.1)  # balanced from here on
    before = copies(group)
    group.descend_(c3(group, dtheta, dgrad), 0.5, usable=torch.tensor([False, True]))
    for name, buffer in group.buffers().items():
        assert torch.equal(buffer[0], before[name][0])
        assert not torch.equal(buffer[1], before[name][1])


@law(criterion=CRITERIA)
def test_a_step_leaves_the_pair_alone(case: Case, criterion: Criterion):
    """The tangent is used up; what it was made from is not."""
    group, (dtheta, dgrad) = case.group(), case.vectors(2)
    before = dtheta.clone(), dgrad.clone()
    group.descend_(criterion(group, dtheta, dgrad), 0.1)
    assert torch.equal(dtheta, before[0])
    assert torch.equal(dgrad, before[1])


@law(where=lambda case: len(case.template.factors) > 1)
def test_factors_are_kept_in_balance_and_the_product_keeps_every_bit(case: Case):
    """Scale moves between factors by powers of two, also in a step of length zero."""
    group, (dtheta, dgrad) = case.structure.init(case.shape, dtype=torch.float64, device="cpu"), case.vectors(2)
    group.descend_(c3(group, dtheta, dgrad), 0.1)
    group.descend_(c3(group, dtheta, dgrad), 0.0)
    straighten_(group)
    before = group.dense()
    scale_(group.factors[0], 2.0**40)
    scale_(group.factors[-1], 2.0**-10)
    group.descend_(c3(group, dtheta, dgrad), 0.0)
    turned = 0.0 if case.left else 1e-14  # by rounding, out of symmetry and back
    torch.testing.assert_close(group.dense() / 2.0**30, before, rtol=0, atol=turned)
    sizes = [factor.diagonal().amax().item() for factor in group.factors]
    assert max(sizes) <= 4 * min(sizes)


# For ever.


def is_sound(factor: Factor) -> bool:
    """Finite, where that is promised with a positive diagonal, and such that a checkpoint of it can be loaded."""
    if not all(torch.isfinite(buffer).all() for buffer in factor.buffers().values()):
        return False
    positive = not isinstance(factor, LeftFactor) or bool(torch.all(factor.diagonal() > 0))
    return positive and factor.fault() is None


@settings(max_examples=4)
@given(
    normalize=st.sampled_from(NORMALIZATIONS),
    lr=st.one_of(st.floats(1e-3, 1 - 1e-3), st.just(1 - 1e-12)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 30),
)
def pushed(case: Case, normalize: Normalization, lr: float, dtype: torch.dtype, seed: int, exponent: int) -> None:
    group = case.structure.init(case.shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for step in range(50):
        x, y = torch.randn(2, 1, *case.shape, generator=generator, dtype=dtype) * 10.0**exponent
        if step % 7 == 0:
            y = x.clone()  # S = 2 x xᵀ: every diagonal element shrinks as much as it can
        group.descend_(Tangent(x, y), lr, normalize)
        assert all(map(is_sound, group.factors))


@pytest.mark.slow
@law(where=small)
def test_diagonal_stays_positive_for_ever(case: Case):
    """Whatever tangents there are, of whatever size."""
    pushed(case)


@law(where=small, dtype=[torch.float32, torch.float64])
def test_a_q_over_the_limit_is_made_smaller_by_a_power_of_two(case: Case, dtype: torch.dtype):
    """Then ``P`` is still within the number format. Blocks that are not usable stay as they are."""
    group = case.structure.init(case.shape, batch=2, dtype=dtype, device="cpu")
    limit = group.limit(dtype)
    for factor in group.factors:
        scale_(factor, 3 * limit)
    before = [factor.diagonal().clone() for factor in group.factors]
    dtheta, dgrad = case.vectors(2, batch=2, dtype=dtype)
    group.descend_(c3(group, dtheta, dgrad), 0.0, usable=torch.tensor([True, False]))
    for factor, old in zip(group.factors, before, strict=True):
        assert torch.equal(factor.diagonal()[1], old[1])
        assert torch.all(factor.diagonal()[0] <= limit)
        ratio = (old[0] / factor.diagonal()[0]).log2()
        assert torch.equal(ratio, ratio.round())
        assert torch.all(ratio <= 2)
    assert torch.isfinite(group.precondition(torch.ones_like(dgrad))[0]).all()


@law(where=lambda case: case.left and small(case), dtype=[torch.float32, torch.float64])
def test_the_diagonal_does_not_vanish(case: Case, dtype: torch.dtype):
    """It stays so large that ``P⁻¹`` of a factor is within the number format."""
    group = case.structure.init(case.shape, dtype=dtype, device="cpu")
    for factor in group.factors:
        scale_(factor, torch.finfo(dtype).tiny)
    x, y = case.vectors(2, dtype=dtype)
    group.descend_(Tangent(x, y), 0.5)
    for factor in group.factors:
        assert torch.isfinite(factor.diagonal().square().reciprocal()).all()


@pytest.mark.slow
@law(where=simple, size=[1e13, 1e-13])
def test_q_stays_bounded_however_long_it_is_pushed(case: Case, size: float):
    """Curvature far from one, and in all directions but one none at all."""
    dtype = torch.float32
    group = case.structure.init(case.shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(case.shape, generator=generator, dtype=dtype)
    for _ in range(400):
        dtheta = torch.randn(1, *case.shape, generator=generator, dtype=dtype)
        dgrad = (u * dtheta).sum() * u * size
        group.descend_(c3(group, dtheta, Whitening().damp(dtheta, dgrad[None])[0]), 0.2, MaxAbs())
    v = torch.ones(1, *case.shape, dtype=dtype)
    for result in (group.precondition(v), group.solve(group.solve_t(v)), group.dense()):
        assert torch.isfinite(result).all()
        assert result.abs().max() > 0


WORST = [
    (torch.float32, MaxAbs(), 0.999),
    (torch.float64, MaxDiag(), 0.5),
    (torch.float32, Spectral(), 0.999),
]


@law(where=simple, worst=WORST)
def test_q_stays_finite_under_the_worst_of_tangents(case: Case, worst: tuple[torch.dtype, Normalization, float]):
    """Tangents that no pair would give, chosen to blow up what lies off the diagonal: Q and P stay finite."""
    dtype, normalize, lr = worst
    group = case.structure.init(case.shape, dtype=dtype, device="cpu")
    rows = list(pairwise(range(case.shape[0])))[::-1]
    for step in range(120):
        x, y = torch.zeros(2, 1, *case.shape, dtype=dtype)
        i, j = rows[step % len(rows)]
        x[0, i], y[0, j] = 1, -1
        group.descend_(Tangent(x, y), lr, normalize)
        assert all(torch.isfinite(buffer).all() for buffer in group.buffers().values())
    assert torch.isfinite(group.precondition(torch.ones(1, *case.shape, dtype=dtype))).all()


@pytest.mark.slow
@law(where=simple, scale=[1e-3, 1e3])
def test_a_curvature_that_every_structure_can_fit_is_fitted(case: Case, scale: float):
    """``H`` a multiple of the identity: ``P`` becomes its inverse, with exact pairs and ``c3``."""
    group = case.structure.init(case.shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    steps = 300
    for step in range(steps):
        dtheta = torch.randn(1, *case.shape, generator=generator, dtype=torch.float64)
        group.descend_(c3(group, dtheta, scale * dtheta), 0.3 * (1 - step / steps))
    v = torch.randn(1, *case.shape, generator=generator, dtype=torch.float64)
    assert torch.linalg.vector_norm(scale * group.precondition(v) - v) < 0.05 * torch.linalg.vector_norm(v)
