"""Fitting many groups at once equals fitting each alone; whitening, against dense matrices and sampled tangents."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from psgd import Kronecker, c2, c3
from psgd.criteria import Criterion
from psgd.groups import pool
from psgd.groups.base import Scaled
from psgd.groups.inverse_free import InverseFree
from psgd.groups.near_symmetric import NearSymmetric, safe
from psgd.groups.pooled import Pooled
from psgd.tangent import Tangent

from ..cases import criteria
from .test_inverse_free import CASES, Case, cases, copies, flatten, moved, stuck, unfolded

EXACT = {"rtol": 1e-9, "atol": 1e-10}
YES, NO = torch.tensor(True), torch.tensor(False)
ALL = torch.ones(9, dtype=torch.bool)
#: several shapes, with factors of equal and different sizes and both kinds
BUCKET = [Case((4, 3)), Case((3, 4)), Case((4,)), Case((2, 3, 4)), Case((3, 7), Kronecker(max_dense=3)), Case((1,))]
BUCKET += [Case((9, 4)), Case((2, 4)), Case((4, 9))]


@pytest.fixture(autouse=True, params=[pool.THIN, 2], ids=["whole", "thin"])
def thin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether small factors, too, are moved without forming their tangent; every law holds for both."""
    monkeypatch.setattr(pool, "THIN", request.param)
    return request.param == 2


#: for laws on shapes, or with a damping, for which a tangent is formed anyway
whole = pytest.mark.parametrize("thin", [pool.THIN], indirect=True, ids=["whole"])


def one_by_one(group: InverseFree) -> list[InverseFree]:
    count = len(next(iter(group.buffers().values())))
    return [group.bind({k: v[i : i + 1].clone() for k, v in group.buffers().items()}) for i in range(count)]


def whiten_(group: InverseFree, g: Tensor, lr: float = 0.1, damping: float = 0.0, **options) -> tuple[Tensor, Tensor]:
    whitened = Pooled([group]).whiten_([g], lr, damping, options.pop("ok", YES), **options)
    (array,) = whitened.arrays
    return multiplied(array), whitened.length


def multiplied(array: Scaled) -> Tensor:
    return array.v if array.scale is None else array.v * array.scale


def tangents_of(criterion: Criterion, groups: list[InverseFree], pairs: list[Tensor]) -> Iterator[Tangent]:
    return (criterion(group, *pair.clone()) for group, pair in zip(groups, pairs, strict=True))


@pytest.mark.parametrize("tidy", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_together_equals_each_alone(tidy: bool, weighted: bool, thin: bool):
    damping = 0.0 if thin else 0.1
    stacks = [case.group(batch=1 + i % 3, seed=i, asymmetry=0.05) for i, case in enumerate(BUCKET)]
    gs = [case.vectors(1, batch=1 + i % 3, seed=10 + i)[0] for i, case in enumerate(BUCKET)]
    count = sum(map(len, gs))
    lr = torch.linspace(0.05, 0.4, count, dtype=torch.float64)
    weight = torch.linspace(0.5, 2.0, count, dtype=torch.float64) if weighted else None
    alone = [group for stack in stacks for group in one_by_one(stack)]
    blocks = [block[None] for g in gs for block in g]
    whitened = Pooled(stacks).whiten_(gs, lr, damping, YES, weight, tidy=tidy)
    lengths = whitened.length
    assert not gs
    assert lengths.shape == (count,)
    assert whitened.divisor is None
    results = [v[None] for array in whitened.arrays for v in multiplied(array)]
    new = [group for stack in stacks for group in one_by_one(stack)]
    for i, (group, g) in enumerate(zip(alone, blocks, strict=True)):
        v, length = whiten_(
            group, g, lr[i].item(), damping, weight=None if weight is None else weight[i : i + 1], tidy=tidy
        )
        torch.testing.assert_close(results[i], v, **EXACT)
        torch.testing.assert_close(lengths[i : i + 1], length, **EXACT)
        for ours, theirs in zip(copies(new[i]), copies(group), strict=True):
            torch.testing.assert_close(ours, theirs, **EXACT)


@criteria
def test_descending_together_equals_each_alone(criterion: Criterion):
    stacks = [case.group(batch=1 + i % 3, seed=i, asymmetry=0.05) for i, case in enumerate(BUCKET)]
    pairs = [case.vectors(2, batch=1 + i % 3, seed=10 + i) for i, case in enumerate(BUCKET)]
    count = sum(pair.shape[1] for pair in pairs)
    lr = torch.linspace(0.05, 0.4, count, dtype=torch.float64)
    usable = torch.arange(count) % 4 != 2
    alone = [group for stack in stacks for group in one_by_one(stack)]
    blocks = [pair[:, b : b + 1] for pair in pairs for b in range(pair.shape[1])]
    informative = usable.split([pair.shape[1] for pair in pairs])
    measured = zip(tangents_of(criterion, stacks, pairs), informative, strict=True)
    Pooled(stacks).descend_(measured, lr, YES)
    assert not list(measured)
    new = [group for stack in stacks for group in one_by_one(stack)]
    for i, (group, pair) in enumerate(zip(alone, blocks, strict=True)):
        before = copies(group)
        if usable[i]:
            group.descend_(criterion(group, *pair.clone()), lr[i].item())
            assert not any(map(torch.equal, before, copies(group)))
        for ours, theirs in zip(copies(new[i]), copies(group), strict=True):
            torch.testing.assert_close(ours, theirs, **(EXACT if usable[i] else {"rtol": 0.0, "atol": 0.0}))


@pytest.mark.parametrize("order", [(c2, c3), (c3, c2)], ids=["c2 c3", "c3 c2"])
def test_groups_may_have_tangents_of_different_kinds(order: tuple[Criterion, Criterion]):
    stacks = [case.group(seed=i) for i, case in enumerate(BUCKET[:2])]
    pairs = [case.vectors(2, seed=10 + i) for i, case in enumerate(BUCKET[:2])]
    alone = [stack.bind({k: v.clone() for k, v in stack.buffers().items()}) for stack in stacks]
    for criterion, group, pair in zip(order, alone, pairs, strict=True):
        group.descend_(criterion(group, *pair.clone()), 0.2)
    measured = [(c(g, *p.clone()), ALL[:1]) for c, g, p in zip(order, stacks, pairs, strict=True)]
    Pooled(stacks).descend_(measured, 0.2, YES)
    for stack, group in zip(stacks, alone, strict=True):
        for ours, theirs in zip(copies(stack), copies(group), strict=True):
            torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_q_that_is_not_finite_does_not_spread(bad: float):
    stacks = [case.group(seed=i) for i, case in enumerate(BUCKET)]
    pairs = [case.vectors(2, seed=10 + i) for i, case in enumerate(BUCKET)]
    next(iter(stacks[0].buffers().values())).fill_(bad)
    Pooled(stacks).descend_([(tangent, ALL[:1]) for tangent in tangents_of(c3, stacks, pairs)], 0.1, YES)
    assert all(bool(torch.isfinite(buffer).all()) for stack in stacks[1:] for buffer in copies(stack))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 4)])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda group: pickle.loads(pickle.dumps(group))], ids=["deep", "pickle"]
)
def test_a_copy_of_a_group_moves_as_the_group_does(shape: tuple[int, ...], duplicate):
    case = Case(shape)
    group, (dtheta, dgrad) = case.group(), case.vectors(2)
    group.descend_(c3(group, dtheta.clone(), dgrad.clone()), 0.1)
    other = duplicate(group)
    for each in (group, other):
        each.descend_(c3(each, dtheta.clone(), dgrad.clone()), 0.1)
        assert all(torch.equal(f.kept_P(), f.root.mT @ f.root) for f in each.factors if isinstance(f, NearSymmetric))
    assert all(map(torch.equal, copies(group), copies(other)))


def tangents(group: InverseFree, g: Tensor, variance: float) -> list[Tensor]:
    """``A Aᵀ`` and what noise on ``g`` adds to it, for each axis, from dense matrices."""
    Ps = [factor.dense()[0].mT @ factor.dense()[0] for factor in group.factors]
    Q = group.dense()[0]
    a = Q.mT @ Q @ g.flatten()
    result = []
    for axis, factor in enumerate(group.factors):
        A = unfolded(a, group, axis)
        others = math.prod(float(P.square().sum()) for i, P in enumerate(Ps) if i != axis)
        T = A @ A.mT + variance * others * Ps[axis] @ Ps[axis]
        result.append(T if isinstance(factor, NearSymmetric) else T.diagonal().diag())
    return result


@pytest.mark.parametrize(
    ("lr", "damping", "tidy"),  # only a short step is seen through the turn
    [(1e-7, 0.0, False), (0.3, 0.0, False), (0.3, 0.5, False), (1e-7, 0.0, True), (1e-7, 0.5, True)],
)
@cases
def test_one_step_is_that_of_dense_matrices(case: Case, lr: float, damping: float, tidy: bool):
    """``Q_i ← Q_i − lr / L · (T_i − k I) Q_i`` for k columns, where ``L`` is at most ``‖T_i‖ + k``, or the guard.

    Turning, where there is any, changes ``Q_i`` and not ``P_i``, to first order.
    """
    group, (g,) = case.group(), case.vectors(1)
    rms = g.square().mean().sqrt()
    T = tangents(group, g, float(damping * rms) ** 2)
    before = [factor.dense()[0].clone() for factor in group.factors]
    whiten_(group, g, lr, damping, tidy=tidy)
    for axis, (factor, Q) in enumerate(zip(group.factors, before, strict=True)):
        n = group.dims[axis]
        k = g.numel() // n
        right = (T[axis] - k * torch.eye(n, dtype=torch.float64)) @ Q
        ours = -moved(factor.dense()[0], Q) / lr
        tolerance = (
            {"rtol": 1e-9, "atol": 1e-9 * right.abs().max().item()} if lr > 0.01 else {"rtol": 1e-4, "atol": 1e-5}
        )
        if tidy:
            ours, right = (M.mT @ Q + Q.mT @ M for M in (ours, right))
        per_L = (ours * right).sum() / right.square().sum()
        torch.testing.assert_close(ours, per_L * right, **tolerance)
        exact = torch.linalg.matrix_norm(T[axis], 2) + k
        column = torch.linalg.vector_norm(T[axis], dim=0).amax() + k
        guard = safe(lr) * (T[axis].square().sum() + n * k**2).sqrt()
        assert torch.maximum(column, guard) * (1 - 1e-5) <= 1 / per_L <= torch.maximum(exact, guard) * (1 + 1e-5)
        if len(group.dims) == 1 and not damping and lr < 0.01:  # rank one: the norm is exact
            torch.testing.assert_close(1 / per_L, exact, rtol=1e-5, atol=0.0)


@whole
@pytest.mark.parametrize(
    "case", [Case((5,)), Case((3, 4)), Case((2, 3, 2)), Case((3, 5), Kronecker(max_dense=3))], ids=str
)
def test_the_tangent_is_the_expectation_of_sampled_ones(case: Case):
    """The pair ``(v, g + ε v)`` for many ``v``, through the criterion, gives on average what no random number gives."""
    damping, count = 0.7, 4000
    group, (g,) = case.group(), case.vectors(1)
    eps = damping * g.square().mean().sqrt()
    v = case.vectors(1, batch=count, seed=3)[0]
    v = torch.cat([v, -v])
    many = group.bind({k: b.expand(2 * count, *b.shape[1:]) for k, b in group.buffers().items()})
    sampled = c3(many, v, g + eps * v)
    a, b = sampled.y / 2 + sampled.x, sampled.y / 2 - sampled.x
    before = [factor.dense()[0].clone() for factor in group.factors]
    whiten_(group, g, 1e-7, damping)
    for axis, (factor, Q) in enumerate(zip(group.factors, before, strict=True)):
        A, B = (torch.stack([unfolded(x, group, axis) for x in xs]) for xs in (a, b))
        S = (A @ A.mT - B @ B.mT).mean(0)
        if not isinstance(factor, NearSymmetric):
            S = S.diagonal().diag()
        dQ = -moved(factor.dense()[0], Q)
        ours = torch.linalg.solve(Q, dQ.mT @ Q + Q @ dQ)
        ours = torch.linalg.solve(Q, ours.mT)  # 2 S, up to a factor
        ours, S = (M / torch.linalg.matrix_norm(M) for M in (ours, S))
        assert torch.linalg.matrix_norm(ours - S) < 0.05
        # Without damping it would be another one.
        other = case.group()
        whiten_(other, g, 1e-7, 0.0)
        dQ = -moved(other.factors[axis].dense()[0], Q)
        plain = torch.linalg.solve(Q, torch.linalg.solve(Q, dQ.mT @ Q + Q @ dQ).mT)
        assert torch.linalg.matrix_norm(plain / torch.linalg.matrix_norm(plain) - S) > 0.1


@cases
def test_what_is_returned_is_of_before_the_step(case: Case, thin: bool):
    group, (g,) = case.group(batch=3, asymmetry=0.05), case.vectors(1, batch=3)
    right = flatten(group.precondition(g))
    start = g.clone()
    v, length = whiten_(group, g, 0.5, 0.0 if thin else 0.1)
    torch.testing.assert_close(flatten(v), right, **EXACT)
    torch.testing.assert_close(length, right.norm(dim=1), **EXACT)
    assert not torch.allclose(flatten(group.precondition(g)), right)
    v.mul_(3)
    assert torch.equal(g, start)


@pytest.mark.parametrize("tidy", [False, True])
@cases
def test_a_weight_divides_the_gradient(case: Case, tidy: bool, thin: bool):
    damping = 0.0 if thin else 0.2
    plain, weighted, (g,) = case.group(batch=2), case.group(batch=2), case.vectors(1, batch=2)
    weight = torch.tensor([0.1, 3.0], dtype=torch.float64)
    right, right_length = whiten_(plain, g / weight.view(2, *[1] * len(case.shape)), 0.3, damping, tidy=tidy)
    v, length = whiten_(weighted, g, 0.3, damping, weight=weight, tidy=tidy)
    torch.testing.assert_close(v, right, **EXACT)
    torch.testing.assert_close(length, right_length, **EXACT)
    torch.testing.assert_close(weighted.dense(), plain.dense(), **EXACT)


@pytest.mark.parametrize("asymmetry", [0.0, 0.1])
@pytest.mark.parametrize("tidy", [False, True])
@pytest.mark.parametrize("case", [Case((6,)), Case((4, 3)), *CASES[9:12], Case((8, 3))], ids=str)
def test_what_is_not_usable_changes_no_bit(case: Case, tidy: bool, asymmetry: float, thin: bool):
    gradients = {
        "ordinary": (case.vectors(1)[0], NO),
        "nan": (torch.full((1, *case.shape), torch.nan, dtype=torch.float64), NO),
        "none": (torch.zeros(1, *case.shape, dtype=torch.float64), YES),
        "not finite": (torch.full((1, *case.shape), torch.inf, dtype=torch.float64), YES),
        "vanished": (case.vectors(1)[0] * 1e-40, YES),
        "exploded": (case.vectors(1)[0] * 1e40, YES),
    }
    for name, (g, ok) in gradients.items():
        group = case.group(asymmetry=asymmetry)
        before = copies(group)
        whiten_(group, g, 0.5, 0.0 if thin else 0.1, ok=ok, tidy=tidy)
        assert all(torch.equal(a, b) for a, b in zip(copies(group), before, strict=True)), name


def test_a_thin_step_is_that_of_the_tangent_it_does_not_form(monkeypatch: pytest.MonkeyPatch):
    """Also if some slices have no gradient. Its length is another estimate of the same norm."""
    groups = [case.group(batch=2, seed=i, asymmetry=0.1) for i, case in enumerate(BUCKET)]
    gs = [case.vectors(1, batch=2, seed=10 + i)[0] for i, case in enumerate(BUCKET)]
    support = [[torch.ones(2, n, dtype=torch.float64) for n in group.dims] for group in groups]
    for slices, g in zip(support, gs, strict=True):
        if slices[0].shape[1] > 1:
            slices[0][1, -1] = 0
            g.view(2, slices[0].shape[1], -1)[1, -1] = 0
    weight = torch.linspace(0.5, 2.0, 2 * len(BUCKET), dtype=torch.float64)
    before = [copies(group) for group in groups]
    changes = []
    for least in (2, 10**9):
        monkeypatch.setattr(pool, "THIN", least)
        some = [group.bind({k: b.clone() for k, b in group.buffers().items()}) for group in groups]
        pooled = Pooled(some)
        assert any(each.thin for each in pooled.pools) == (least == 2)
        pooled.whiten_(list(gs), 0.1, 0.0, YES, weight, tidy=False, support=support)
        new = [copies(group) for group in some]
        changes.append([a - b for each in zip(new, before, strict=True) for a, b in zip(*each, strict=True)])
    for thin, whole in zip(*changes, strict=True):
        for a, b in zip(thin, whole, strict=True):
            assert torch.linalg.vector_norm(a) > 0
            ratio = torch.linalg.vector_norm(a) / torch.linalg.vector_norm(b)
            torch.testing.assert_close(a, ratio * b, **EXACT)
            assert 0.7 < ratio < 1.4


@pytest.mark.parametrize("damping", [0.0, 10.0])
def test_the_damping_does_not_hide_the_direction_that_is_stretched_most(damping: float):
    """Damping is largest where gradients are small, and it is no part of the step."""
    case = Case((40, 6), Kronecker(max_dense=6))
    group, g = case.group(), torch.zeros(1, 40, 6, dtype=torch.float64)
    g[0, :, 0] = torch.randn(40, dtype=torch.float64)
    (array,) = Pooled([group]).whiten_([g], 0.1, damping, YES).arrays
    exact = torch.linalg.matrix_norm(multiplied(array), 2)
    torch.testing.assert_close(array.spectral_norm(0), exact, rtol=1e-6, atol=0.0)


def test_useless_blocks_do_not_disturb_the_others():
    case = Case((4, 3))
    group, (g,) = case.group(batch=3), case.vectors(1, batch=3)
    right = one_by_one(group)
    g[1] = torch.nan
    whiten_(group, g, 0.3, 0.1)
    for i in (0, 2):
        whiten_(right[i], g[i : i + 1], 0.3, 0.1)
        torch.testing.assert_close(group.dense()[i], right[i].dense()[0], **EXACT)
    assert torch.equal(group.dense()[1], right[1].dense()[0])


def test_factors_whose_tangent_overflows_become_smaller():
    """They cannot be fitted: the others, and blocks without a step, stay."""
    group = Kronecker().init((4,), batch=3, dtype=torch.float32, device="cpu")
    (Q,) = group.buffers().values()
    Q[1:] *= 0.5 * group.limit(torch.float32)
    before = Q.clone()
    g = torch.full((3, 4), 1e3)
    g[2] = torch.nan
    whiten_(group, g)
    assert not torch.equal(Q[0], before[0])  # the tangent is finite here
    assert torch.equal(Q[1], before[1] / 2**8)
    assert torch.equal(Q[2], before[2])
    for _ in range(100):
        length = whiten_(group, g, 0.3)[1]
    assert length[1].item() < 1e3


def test_without_tidying_factors_are_neither_turned_nor_balanced():
    case = Case((4, 3))
    (g,) = case.vectors(1)

    def after(damping: float, tidy: bool) -> InverseFree:
        group = case.group(asymmetry=0.1)
        group.factors[0].dense().mul_(2.0**10)
        whiten_(group, g, 1e-9, damping, tidy=tidy)
        return group

    bare = after(0.0, False)
    sizes = [[float(f.diagonal().amax()) for f in group.factors] for group in (bare, after(0.0, True))]
    assert sizes[0][0] > 200 * sizes[0][1]
    assert sizes[1][0] < 4 * sizes[1][1]
    for factor, tidied in zip(bare.factors, after(0.0, True).factors, strict=True):
        skew, left = (
            torch.linalg.matrix_norm(Q - Q.mT) / torch.linalg.matrix_norm(Q) for Q in (factor.dense(), tidied.dense())
        )
        assert left < 0.5 * skew


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_what_is_not_finite_stays_in_its_block(value: float):
    """Also in sums over the factors of a block, where damping and balancing need them: ``P = 0`` has no logarithm."""
    groups = [case.group(batch=2, seed=i) for i, case in enumerate(BUCKET)]
    gs = [case.vectors(1, batch=2, seed=10 + i)[0] for i, case in enumerate(BUCKET)]
    alone = [one_by_one(group)[1] for group in groups]
    for group in groups:
        for buffer in group.buffers().values():
            buffer[0].fill_(value)
    Pooled(groups).whiten_(list(gs), 0.1, 0.1, YES)
    Pooled(alone).whiten_([g[1:] for g in gs], 0.1, 0.1, YES)
    for group, right in zip(groups, alone, strict=True):
        for ours, theirs in zip(group.buffers().values(), right.buffers().values(), strict=True):
            torch.testing.assert_close(ours[1:], theirs, **EXACT)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_makes_no_difference():
    """Factors side by side are fitted in place, others in a copy that is put back."""
    case = Case((4, 4, 4))
    (g,) = case.vectors(1, batch=2)
    apart, joined = case.group(batch=2, asymmetry=0.1), case.group(batch=2, asymmetry=0.1)
    buffers = joined.buffers()
    whole = torch.cat(list(buffers.values()))
    joined = joined.bind(dict(zip(buffers, whole.split(2), strict=True)))
    results = []
    for group, copied in ((apart, True), (joined, False)):
        pooled = Pooled([group])
        assert [pool.copied for pool in pooled.pools] == [copied]
        if not copied:
            assert pooled.pools[0].Q.data_ptr() == whole.data_ptr()
        for _ in range(3):
            pooled.whiten_([g], 0.3, 0.1, YES)
        results.append(group.dense())
    assert torch.equal(*results)
    assert not torch.equal(results[0], case.group(batch=2, asymmetry=0.1).dense())


def test_pooled_groups_see_what_others_did_to_their_groups():
    """Also where factors are copied."""
    case = Case((4, 4))
    (g,) = case.vectors(1)
    group = case.group()
    pooled = Pooled([group])
    pooled.whiten_([g], 0.1, 0.0, YES)
    for factor in group.factors:
        factor.dense().mul_(2.0)
    fresh = group.bind({k: v.clone() for k, v in group.buffers().items()})
    pooled.whiten_([g], 0.1, 0.0, YES)
    whiten_(fresh, g, 0.1, 0.0)
    torch.testing.assert_close(group.dense(), fresh.dense(), **EXACT)


@pytest.mark.parametrize("lr", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("m", [9, 100])
def test_a_missed_norm_stretches_no_direction(m: int, lr: float):
    """But for the growth towards white, by less than ``1 + lr``."""
    group = Kronecker().init((m + 1, 2), dtype=torch.float32, device="cpu")
    whiten_(group, stuck(m), lr, tidy=False)
    for factor in group.factors:
        assert torch.linalg.matrix_norm(factor.dense()[0], 2) <= 1 + lr


# -- where the steps lead ---------------------------------------------------------------------------------------------


@whole
@pytest.mark.parametrize(
    ("dtype", "condition", "limit"), [(torch.float32, 30.0, 0.3), (torch.bfloat16, 4.0, 0.5)], ids=str
)
def test_gradients_are_whitened(dtype: torch.dtype, condition: float, limit: float):
    """``G = L_0 Z L_1`` for random ``Z``: ``P → (C_0 ⊗ C_1)^(−1/2)`` for the covariances ``C_i = L_i L_iᵀ``."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, 6)
    L = []
    for n in shape:
        U, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
        L.append(1.3 * U * torch.logspace(0, math.log10(condition) / 2, n, dtype=torch.float64) @ U.mT)
    group = Kronecker().init(shape, dtype=dtype, device="cpu")
    pooled = Pooled([group])

    def error() -> float:
        Q = group.dense()[0].double()
        eigenvalues = torch.linalg.eigvalsh(Q @ torch.kron(*L) @ Q.mT)  # of P C^½
        return float(eigenvalues.log().square().mean().sqrt())

    assert error() > 2 * limit
    for step in range(500):
        G = L[0] @ torch.randn(1, *shape, generator=generator, dtype=torch.float64) @ L[1]
        pooled.whiten_([G.to(dtype)], 0.1 if step < 250 else 0.03, 1e-6, YES, tidy=step % 8 == 0)
    assert error() < limit


@pytest.mark.slow
@whole
@pytest.mark.parametrize(("shape", "max_dense"), [((4, 5), 2048), ((3, 5, 2), 4)], ids=str)
def test_several_factors_match_the_covariances_along_each_axis(shape: tuple[int, ...], max_dense: int):
    """``tr_others(P R_g P) = tr_others(I)``, in which a gradient counts by one over what its step is normalised by.

    If ``R_g`` is no Kronecker product, it is not ``P R_g P = I``.
    """
    generator = torch.Generator().manual_seed(0)
    numel = math.prod(shape)
    mixing = torch.randn(numel, numel, generator=generator, dtype=torch.float64)
    samples = (torch.randn(40, numel, generator=generator, dtype=torch.float64) @ mixing).view(40, 1, *shape)
    group = Kronecker(max_dense).init(shape, dtype=torch.float64, device="cpu")
    pooled = Pooled([group])
    for t in range(1000):
        pooled.whiten_([samples[t % 40].clone()], 0.2 if t < 250 else 0.03 if t < 500 else 0.005, 0.0, YES)
    seen = torch.cat([group.precondition(sample) for sample in samples])
    for axis, n in enumerate(shape):
        A = seen.movedim(axis + 1, 1).flatten(2)
        each, expected = A @ A.mT, numel / n * torch.eye(n, dtype=torch.float64)
        if n > max_dense:  # a diagonal factor sees the diagonal
            each = torch.diag_embed(each.diagonal(dim1=1, dim2=2))
        weights = 1 / (torch.linalg.matrix_norm(each, 2) + numel / n)
        covariance = (weights.view(-1, 1, 1) * each).sum(0) / weights.sum()
        torch.testing.assert_close(covariance, expected, rtol=0.03, atol=0.03 * numel / n)
    R_g = samples.flatten(1).mT @ samples.flatten(1) / len(samples)
    P = group.dense()[0].mT @ group.dense()[0]
    assert (P @ R_g @ P - torch.eye(numel, dtype=torch.float64)).norm() > 0.3
