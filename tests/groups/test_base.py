"""Laws that every structure obeys, whatever it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psgd import Dense, Diagonal, Kronecker, LimitedMemory, LowRank, MaxAbs, Whitening, c3
from psgd.criteria import Criterion
from psgd.groups import Group, Groups, Structure
from psgd.tangent import Tangent

from ..cases import CASES, CRITERIA, GROUPS, NORMALIZATIONS, Case, cases, criteria, groups, normalizations, scale_

EXACT = {"rtol": 1e-9, "atol": 1e-10}


def flatten(v: Tensor) -> Tensor:
    return v.reshape(v.shape[0], -1)


@cases
def test_maps_are_those_of_the_dense_matrix(case: Case):
    group, (v,) = case.group(batch=2), case.vectors(batch=2)
    Q = group.dense()
    for ours, matrix in [
        (group.apply, Q),
        (group.apply_t, Q.mT),
        (group.solve, torch.linalg.inv(Q)),
        (group.solve_t, torch.linalg.inv(Q).mT),
        (group.precondition, Q.mT @ Q),
    ]:
        result = ours(v)
        assert result.shape == v.shape
        torch.testing.assert_close(flatten(result), (matrix @ flatten(v)[:, :, None])[:, :, 0], **EXACT)


@cases
def test_solve_undoes_apply(case: Case):
    group, (v,) = case.group(), case.vectors()
    torch.testing.assert_close(group.solve(group.apply(v)), v, **EXACT)
    torch.testing.assert_close(group.solve_t(group.apply_t(v)), v, **EXACT)


@cases
def test_apply_t_is_the_adjoint_of_apply(case: Case):
    group, (u, v) = case.group(), case.vectors(2)
    torch.testing.assert_close((group.apply(u) * v).sum(), (u * group.apply_t(v)).sum(), **EXACT)


@cases
def test_preconditioner_is_positive_definite(case: Case):
    Q = case.group().dense()[0]
    eigenvalues = torch.linalg.eigvalsh(Q.mT @ Q)
    assert eigenvalues.min() > 0


@groups
def test_group_is_closed_under_products(case: Case):
    """The product of two elements is an element: zero where the structure has no number, positive on the diagonal."""
    for p, q in zip(case.group(seed=1).factors, case.group(seed=2).factors, strict=True):
        product = p.dense() @ q.dense()
        free = possible(p.dense(), q.dense())
        assert torch.all(product[~free] == 0)
        assert torch.all(product.diagonal(dim1=1, dim2=2) > 0)


def possible(*elements: Tensor) -> Tensor:
    return torch.stack([e != 0 for e in elements]).any(0)


@cases
@normalizations
def test_group_is_closed_under_descent(case: Case, normalize):
    """A step keeps every zero that belongs to the structure."""
    group, (x, y) = case.group(), case.vectors(2)
    zeros = [factor.dense() == 0 for factor in case.group(seed=7).factors]
    group.descend_(Tangent(x, y), 0.5, normalize)
    for factor, zero in zip(group.factors, zeros, strict=True):
        assert torch.all(factor.dense()[zero] == 0)
        assert torch.all(factor.diagonal() > 0)


@cases
@normalizations
@criteria
def test_stacked_equals_one_by_one(case: Case, criterion: Criterion, normalize):
    stack, (dtheta, dgrad) = case.group(batch=3), case.vectors(2, batch=3)
    alone = [stack.bind({k: v[i : i + 1].clone() for k, v in stack.buffers().items()}) for i in range(3)]
    stack.descend_(criterion(stack, dtheta, dgrad), 0.1, normalize)
    for i, group in enumerate(alone):
        one = slice(i, i + 1)
        group.descend_(criterion(group, dtheta[one], dgrad[one]), 0.1, normalize)
        torch.testing.assert_close(group.dense()[0], stack.dense()[i], **EXACT)


def criterion_value(criterion: Criterion, Q: Tensor, dtheta: Tensor, dgrad: Tensor) -> Tensor:
    P = Q.mT @ Q
    name = criterion.__name__
    if name == "c1":
        return ((dgrad - torch.linalg.solve(P, dtheta)) ** 2).sum()
    if name == "c2":
        return ((P @ dgrad - dtheta) ** 2).sum()
    return dgrad @ P @ dgrad + dtheta @ torch.linalg.solve(P, dtheta)


@pytest.mark.parametrize("case", [c for c in GROUPS if len(c.shape) < 4 and max(c.shape) < 200], ids=str)
@criteria
def test_descent_is_along_the_projected_gradient_of_autograd(case: Case, criterion: Criterion):
    """For every factor, ``∂c(Q_i + E Q_i)/∂E`` at E = 0, restricted to the group, is what a step moves along."""
    group, (dtheta, dgrad) = case.group(), case.vectors(2)
    tangent = criterion(group, dtheta, dgrad)
    factors = [factor.dense()[0].clone() for factor in group.factors]
    dims = [1, *group.dims]
    folded = Tangent(tangent.x.reshape(dims), tangent.y.reshape(dims))
    for axis, factor in enumerate(group.factors):
        n = factors[axis].shape[0]
        E = torch.zeros(n, n, dtype=torch.float64, requires_grad=True)
        Q = torch.ones(1, 1, dtype=torch.float64)
        for i, f in enumerate(factors):
            Q = torch.kron(Q, f + E @ f if i == axis else f)
        value = criterion_value(criterion, Q, dtheta.flatten(), dgrad.flatten())
        (gradient,) = torch.autograd.grad(value, E)
        free = possible(case.group(seed=7).factors[axis].dense()[0], case.group(seed=8).factors[axis].dense()[0])
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
            moved = (before - factor.dense()[0]) / 1e-3
            off = ~torch.eye(n, dtype=torch.bool)
            ours, theirs = (2 * moved)[off], (expected @ before)[off]
            assert torch.linalg.vector_norm(ours - theirs) <= 1e-9 * torch.linalg.vector_norm(expected @ before)


@groups
@criteria
@normalizations
def test_one_step_is_the_formula_of_the_paper(case: Case, criterion: Criterion, normalize):
    """``Q ← Q − μ₀ / ‖∇E‖ · ∇E Q`` for every factor, written with dense matrices."""
    group, (dtheta, dgrad) = case.group(), case.vectors(2)
    tangent = criterion(group, dtheta, dgrad)
    expected = []
    for axis, factor in enumerate(group.factors):
        x, y = (
            v.reshape(1, *group.dims)[0].movedim(axis, 0).reshape(group.dims[axis], -1) for v in (tangent.x, tangent.y)
        )
        S = x @ y.mT + y @ x.mT
        free = possible(case.group(seed=7).factors[axis].dense()[0], case.group(seed=8).factors[axis].dense()[0])
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
            moved, right = torch.linalg.matrix_norm(Q - new / 2 ** scale.round()), torch.linalg.matrix_norm(Q - goal)
            assert right * 0.999 <= moved <= right * 2
        else:
            assert abs(scale - scale.round()) < 1e-9
            torch.testing.assert_close(new / 2 ** scale.round(), goal, rtol=1e-9, atol=1e-9)
            scales = scales * 2 ** scale.round()
    assert scales == 1.0


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e6, 1e12])
@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: c.__name__)
@pytest.mark.parametrize("case", [c for c in CASES if c.shape in [(5,), (7,), (6,), (4, 3), (2, 3, 4)]], ids=str)
def test_equivariance(case: Case, criterion: Criterion, scale: float):
    """With H scaled by c and Q by c^(−1/2), the trajectory of PH is the same up to rounding."""
    n = case.vectors()[0].numel()
    generator = torch.Generator().manual_seed(3)
    A = torch.randn(n, n, generator=generator, dtype=torch.float64)
    H = A @ A.mT / n + 0.5 * torch.eye(n, dtype=torch.float64)
    plain, scaled = case.group(), case.group()
    scale_(scaled.factors[0], scale**-0.5)
    for _ in range(40):
        dtheta = torch.randn(1, *case.shape, generator=generator, dtype=torch.float64)
        # The secant criteria compare δθ with Pδg: their trajectories are the same where both sides scale alike.
        shrunk = dtheta * scale**-0.5
        dgrad, big = ((v.reshape(1, n) @ M).reshape(dtheta.shape) for v, M in [(dtheta, H), (shrunk, H * scale)])
        plain.descend_(criterion(plain, dtheta, dgrad), 0.1, MaxAbs())
        scaled.descend_(criterion(scaled, shrunk, big), 0.1, MaxAbs())
    ours, theirs = (Q.mT @ Q @ M for Q, M in [(plain.dense()[0], H), (scaled.dense()[0], H * scale)])
    torch.testing.assert_close(theirs, ours, rtol=1e-8, atol=1e-8)


@settings(max_examples=40)
@given(
    case=st.sampled_from([c for c in CASES if max(c.shape) < 100]),
    normalize=st.sampled_from(NORMALIZATIONS),
    lr=st.one_of(st.floats(1e-3, 1 - 1e-3), st.just(1 - 1e-12)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 30),
)
def test_diagonal_stays_positive_for_ever(case: Case, normalize, lr, dtype, seed, exponent):
    group = case.structure.init(case.shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for step in range(60):
        x, y = torch.randn(2, 1, *case.shape, generator=generator, dtype=dtype) * 10.0**exponent
        if step % 7 == 0:
            y = x  # S = 2 x xᵀ: every diagonal element shrinks as much as it can
        group.descend_(Tangent(x, y), lr, normalize)
        for factor in group.factors:
            assert torch.all(factor.diagonal() > 0)
            assert all(torch.isfinite(buffer).all() for buffer in factor.buffers().values())


@cases
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_a_useless_tangent_changes_no_bit(case: Case, bad: float):
    group, (x, y) = case.group(batch=2), case.vectors(2, batch=2)
    group.descend_(Tangent(x, y), 0.1, MaxAbs())  # balanced from here on
    before = {k: v.clone() for k, v in group.buffers().items()}
    if bad == 0.0:
        x = x.clone()
        x[0] = 0.0
    else:
        x = x.clone()
        x[0].view(-1)[0] = bad
    group.descend_(Tangent(x, y), 0.1, MaxAbs())
    for name, buffer in group.buffers().items():
        assert torch.equal(buffer[0], before[name][0])
    assert any(not torch.equal(buffer[1], before[name][1]) for name, buffer in group.buffers().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e13, 1e-13])
@pytest.mark.parametrize("case", [c for c in CASES if c.shape in [(5,), (7,), (6,), (4, 3), (2, 3, 4)]], ids=str)
def test_q_stays_bounded_however_long_it_is_pushed(case: Case, dtype: torch.dtype, size: float):
    """Curvature far from one, and in all directions but one none at all."""
    group = case.structure.init(case.shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(case.shape, generator=generator, dtype=dtype)
    for _ in range(1500):
        dtheta = torch.randn(1, *case.shape, generator=generator, dtype=dtype)
        dgrad = (u * dtheta).sum() * u * size
        group.descend_(c3(group, dtheta, Whitening().damp(dtheta, dgrad[None])[0]), 0.2, MaxAbs())
    v = torch.ones(1, *case.shape, dtype=dtype)
    for result in (group.precondition(v), group.solve(group.solve_t(v)), group.dense()):
        assert torch.isfinite(result).all()
        assert result.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalize", NORMALIZATIONS, ids=str)
@pytest.mark.parametrize("lr", [0.5, 0.999])
def test_q_stays_finite_under_the_worst_of_tangents(dtype: torch.dtype, normalize, lr: float):
    """Tangents that no pair would give, chosen to blow up what lies off the diagonal: Q and P stay finite."""
    for structure, shape in [(Dense(), (12,)), (LimitedMemory(11), (12,)), (LowRank(5), (12,)), (Kronecker(), (6, 4))]:
        group = structure.init(shape, dtype=dtype, device="cpu")
        n = shape[0]
        for step in range(300):
            x, y = torch.zeros(2, 1, *shape, dtype=dtype)
            i = n - 2 - step % (n - 1)
            x[0, i], y[0, i + 1] = 1, -1
            group.descend_(Tangent(x, y), lr, normalize)
            assert torch.isfinite(group.dense()).all()
        v = torch.ones(1, *shape, dtype=dtype)
        assert torch.isfinite(group.precondition(v)).all()


def test_factors_are_kept_in_balance_and_p_keeps_every_bit():
    group = Kronecker(inverse_free=False).init((4, 3, 2), dtype=torch.float64, device="cpu")
    group.factors[0].dense().mul_(2.0**40)
    group.factors[2].dense().mul_(2.0**-10)
    before = group.dense().clone()
    group.descend_(c3(group, *torch.randn(2, 1, 4, 3, 2, dtype=torch.float64)), 0.0)
    assert torch.equal(group.dense(), before)
    sizes = torch.stack([factor.diagonal().amax() for factor in group.factors]).log2()
    assert sizes.max() - sizes.min() <= 2


def test_meta_groups_take_no_memory_and_tell_their_size():
    group = Kronecker().init((300, 200), batch=3, dtype=torch.float32, device="meta")
    assert group.nbytes() == 3 * 4 * (300**2 + 200**2)
    assert isinstance(group, Group)
    assert group.describe() == "symmetric 300 ⊗ symmetric 200"


# -- groups of a bucket -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "structure", [Kronecker(), Kronecker(max_dense=3), Kronecker(max_dense=0), Diagonal()], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_direction_has_the_length_of_its_step(structure: Structure, dtype: torch.dtype):
    groups = [structure.init(shape, batch=2, dtype=torch.float64, device="cpu") for shape in ((3, 4), (5,))]
    for group in groups:
        for buffer in group.buffers().values():
            buffer.add_(torch.rand(buffer.shape, dtype=buffer.dtype, generator=torch.Generator().manual_seed(0)))
    gs = [torch.randn(2, *shape, dtype=torch.float64) for shape in ((3, 4), (5,))]
    right = [group.precondition(g) for group, g in zip(groups, gs, strict=True)]
    rate = torch.tensor([0.5, 2.0], dtype=torch.float64)
    together = structure.together(groups)
    d = together.precondition(gs)
    assert d.divisor is None
    torch.testing.assert_close(d.length, torch.cat([r.flatten(1).norm(dim=1) for r in right]))
    for array, r, g in zip(d.arrays, right, gs, strict=True):
        torch.testing.assert_close(array.length(), r.flatten(1).norm(dim=1))
        step = array.times(rate, g.shape[1:], dtype)
        assert step.dtype == dtype
        assert step.shape == g.shape
        torch.testing.assert_close(step, (r * rate.view(-1, *[1] * (g.ndim - 1))).to(dtype))


@criteria
@pytest.mark.parametrize("structure", [Dense(), Kronecker(), Kronecker(inverse_free=False), LowRank(1)], ids=str)
def test_groups_together_move_as_each_alone(structure: Structure, criterion: Criterion):
    """Blocks whose pair says nothing keep every bit, and all do if there is no step."""
    shapes = ((3, 4), (6,))
    groups = [structure.init(shape, batch=2, dtype=torch.float64, device="cpu") for shape in shapes]
    alone = [group.bind({k: v.clone() for k, v in group.buffers().items()}) for group in groups]
    pairs = [torch.randn(2, 2, *shape, dtype=torch.float64) for shape in shapes]
    informative = [torch.tensor([True, False]), torch.tensor([True, True])]
    together = structure.together(groups)
    for ok in (torch.tensor(False), torch.tensor(True)):
        before = [group.dense().clone() for group in groups]
        measured = [(criterion(Q, *p.clone()), i) for Q, p, i in zip(groups, pairs, informative, strict=True)]
        together.descend_(iter(measured), 0.1, ok)
        for old, group, says in zip(before, groups, informative, strict=True):
            for row, moves in enumerate(ok & says):
                assert torch.equal(group.dense()[row], old[row]) != moves
    for group, Q, pair, says in zip(groups, alone, pairs, informative, strict=True):
        Q.descend_(criterion(Q, *pair.clone()), 0.1, usable=says)
        torch.testing.assert_close(group.dense(), Q.dense(), **EXACT)


def test_only_structures_that_whiten_in_closed_form_have_whiten_():
    Q = Groups([Diagonal().init((3,), dtype=torch.float32, device="cpu")])
    assert not Q.whitens
    with pytest.raises(TypeError, match="diagonal 3: only structures"):
        Q.whiten_([torch.ones(1, 3)], 0.1, 0.0, torch.tensor(True))
