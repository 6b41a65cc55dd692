"""The three groups that ``Q = (I + U Vᵀ) diag(d)`` moves in, and what it is good for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from psgd import (
    PSGD,
    Diagonal,
    FiniteDifference,
    HessianVector,
    Joint,
    LowRank,
    MaxAbs,
    MaxDiag,
    Spectral,
    Whitening,
    c3,
    diagnostics,
)
from psgd.criteria import Criterion
from psgd.groups import Group
from psgd.groups.low_rank import LowRankFactor, LowRankTangent, _step
from psgd.tangent import Tangent

from ..cases import CASES, Case, batch, criteria, normalizations, small_model, train
from ..laws.test_descent import value

LOW_RANK = [c for c in CASES if isinstance(c.group().factors[0], LowRankFactor)]
low_rank = pytest.mark.parametrize("case", LOW_RANK, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def factor_of(group: Group) -> LowRankFactor:
    factor = group.factors[0]
    assert isinstance(factor, LowRankFactor)
    return factor


def left_half(f: LowRankFactor) -> Tensor:
    """``I + U Vᵀ``"""
    return torch.eye(f.U.shape[1], dtype=f.U.dtype) + f.U[0] @ f.V[0].mT


def close(ours: Tensor, right: Tensor, tolerance: float = 1e-9) -> None:
    assert torch.linalg.vector_norm(ours - right) <= tolerance * torch.linalg.vector_norm(right)


@low_rank
def test_with_u_or_v_fixed_products_stay_within(case: Case):
    """``(I + U Vᵀ)(I + M Vᵀ) − I`` has rows in the span of ``V``, and the same with ``U`` and columns."""
    f, other = factor_of(case.group(seed=1)), factor_of(case.group(seed=2))
    eye = torch.eye(f.U.shape[1], dtype=torch.float64)
    for U, V in [(other.U, f.V), (f.U, other.V)]:
        product = left_half(f) @ left_half(LowRankFactor(U, V, f.diag)) - eye
        basis, change = (V[0], product.mT) if V is f.V else (U[0], product)
        close(basis @ torch.linalg.lstsq(basis, change).solution, change)
        assert torch.linalg.matrix_rank(product) <= basis.shape[1]


@low_rank
@criteria
def test_each_part_moves_along_its_relative_gradient(case: Case, criterion: Criterion):
    """``∂c/∂M`` at M = 0 by autograd, for ``(I + M Vᵀ) Q``, ``(I + U Mᵀ) Q`` and ``Q (I + diag(m))``."""
    group, (dtheta, dgrad) = case.group(), case.vectors(2)
    f, tangent = factor_of(group), criterion(group, dtheta, dgrad)
    n, r = f.U.shape[1:]
    flat = Tangent(tangent.x.reshape(1, n, 1), tangent.y.reshape(1, n, 1))
    left, right, m = (torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in ((n, r), (n, r), (n,)))
    eye, Q = torch.eye(n, dtype=torch.float64), f.dense()[0]
    moved = (eye + left @ f.V[0].mT) @ (eye + f.U[0] @ right.mT) @ Q @ (eye + m.diag())
    start = value(criterion, moved, dtheta, dgrad)
    to_left, to_right, to_diag = torch.autograd.grad(start, [left, right, m])

    close(2 * f.project_diagonal(flat).diagonal()[0], to_diag)
    # The tangents are scaled to lengths of one.
    length = torch.linalg.vector_norm(flat.x) * torch.linalg.vector_norm(flat.y)
    step = torch.full((1, 1, 1), 0.3, dtype=torch.float64)
    before = left_half(f)
    for gradient, fixed in [(to_left @ f.V[0].mT, f.V), (f.U[0] @ to_right.mT, f.U)]:
        E = LowRankTangent(flat, fixed)
        relative = gradient / (2 * length * torch.linalg.vector_norm(fixed) ** 2)
        close(E.diagonal()[0], relative.diagonal())
        new = LowRankFactor(f.U.clone(), f.V.clone(), f.diag)
        if fixed is f.V:
            new.descend_off_diagonal_(E, step, torch.ones_like(step))
            assert torch.equal(new.V, f.V)
        else:
            new._descend_V_(E, step)
            assert torch.equal(new.U, f.U)
        close(left_half(new), (eye - 0.3 * relative) @ before)


@low_rank
def test_norms_are_those_of_the_matrix(case: Case):
    f, (x, y) = factor_of(case.group(batch=3)), case.vectors(2, batch=3).reshape(2, 3, -1, 1)
    E = LowRankTangent(Tangent(x, y), f.V)
    x, y, V = (v / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True) for v in (x, y, f.V))
    matrix = (x @ y.mT + y @ x.mT) @ V @ V.mT
    eigenvalues = torch.linalg.eigvals(matrix).abs().amax(-1)
    torch.testing.assert_close(E.max_diag(), eigenvalues)
    torch.testing.assert_close(E.spectral(), torch.linalg.matrix_norm(matrix, 2))
    rows = torch.linalg.vector_norm(matrix, dim=2).amax(1)
    torch.testing.assert_close(E.max_abs(), torch.maximum(rows, eigenvalues))
    assert torch.all(E.max_abs() >= matrix.abs().amax((1, 2)))


@low_rank
@normalizations
@criteria
def test_one_step_is_the_formula(case: Case, criterion: Criterion, normalize):
    """``d``, ``U`` and then ``V``, written with dense matrices."""
    group, (dtheta, dgrad) = case.group(), case.vectors(2)
    f, tangent = factor_of(group), criterion(group, dtheta, dgrad)
    x, y = tangent.x.reshape(-1, 1), tangent.y.reshape(-1, 1)
    S = x @ y.mT + y @ x.mT
    A, Q = left_half(f), f.dense()[0]

    def unit(E: Tensor) -> Tensor:
        eigenvalue, row = torch.linalg.eigvals(E).abs().max(), torch.linalg.vector_norm(E, dim=1).max()
        norms = {"MaxDiag": eigenvalue, "MaxAbs": torch.maximum(eigenvalue, row)}
        return E / norms.get(type(normalize).__name__, torch.linalg.matrix_norm(E, 2))

    to_d = torch.linalg.solve(Q, S @ Q).diagonal()
    d = f.diag[0] * (1 - 0.05 * to_d / to_d.abs().max())
    d = d * (1 - 0.05 * S.trace() / torch.linalg.matrix_norm(S, "nuc"))
    A1 = A - 0.05 * unit(S @ f.V[0] @ f.V[0].mT) @ A
    U1 = (A1 - torch.eye(len(S), dtype=torch.float64)) @ torch.linalg.pinv(f.V[0].mT)
    A2 = A1 - 0.05 * unit(S @ U1 @ U1.mT).mT @ A1
    group.descend_(tangent, 0.05, normalize)
    close(f.dense()[0], A2 * d, 1e-8)


def test_a_norm_of_rounding_does_not_lengthen_a_step():
    norm = torch.tensor([2.0, 2.0**-30, 0.0, 2.0])
    usable = torch.tensor([True, True, True, False])
    assert _step(0.5, norm, usable).tolist() == [0.25, 2.0**19, 0.0, 0.0]


@low_rank
def test_every_normalization_takes_a_step_of_its_own(case: Case):
    steps = []
    for normalize in (MaxDiag(), MaxAbs(), Spectral()):
        group, (x, y) = case.group(), case.vectors(2)
        # Nearly at right angles to the subspace of V: there the eigenvalues say little about the longest row.
        f = factor_of(group)
        V, _ = torch.linalg.qr(f.V[0])
        x = (x.reshape(-1) - 0.99 * V @ (V.mT @ x.reshape(-1))).reshape(x.shape)
        before = left_half(f)
        group.descend_(Tangent(x, y), 0.01, normalize)
        steps.append(torch.linalg.matrix_norm(left_half(f) - before).item())
    assert steps[0] > 1.001 * steps[1] > 1.001**2 * steps[2]


@pytest.mark.parametrize("rank", [1, 3, 10])
@dtypes
def test_it_starts_from_the_identity_and_the_same_columns_everywhere(rank: int, dtype: torch.dtype):
    stack = LowRank(rank).init((5, 10), batch=3, dtype=dtype, device="cpu")
    assert torch.equal(stack.dense(), torch.eye(50, dtype=dtype).expand(3, 50, 50))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    V = factor_of(LowRank(rank).init((50,), dtype=torch.float64, device="cpu")).V
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(factor_of(stack).V, V.to(dtype).expand(3, 50, rank))
    assert torch.linalg.matrix_rank(V[0]) == rank


def test_size_and_small_blocks():
    group = LowRank(10).init((300, 200), batch=3, dtype=torch.float32, device="meta")
    assert group.nbytes() == 3 * 4 * 60_000 * 21
    assert group.describe() == "rank 10 and diagonal 60000"
    for n in (1, 5, 10, 21):
        assert LowRank(10).init((n,), dtype=torch.float32, device="cpu").describe() == f"dense {n}"
    assert LowRank(10).init((22,), dtype=torch.float32, device="cpu").describe() == "rank 10 and diagonal 22"


@pytest.mark.slow
@dtypes
@normalizations
@low_rank
def test_q_stays_invertible_and_solves_accurate_for_ever(case: Case, dtype: torch.dtype, normalize):
    """Any tangents, among them such as push one eigenvalue to zero as fast as they can; a short and a long step."""
    lr = torch.tensor([0.1, 1 - 1e-6], dtype=dtype)
    group = case.structure.init(case.shape, batch=2, dtype=dtype, device="cpu")
    f = factor_of(group)
    eye = torch.eye(f.U.shape[1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(120):
        x, y = torch.randn(2, 2, *case.shape, generator=generator, dtype=dtype)
        if step % 3 == 0:
            x = y = (f.V[:, :, :1] if step % 2 else f.U[:, :, :1]).reshape(x.shape) + 1e-3 * x
        group.descend_(Tangent(x.clone(), y.clone()), lr, normalize)
        assert torch.all(f.diag > 0)
        assert torch.all(torch.det(eye + f.U.double() @ f.V.double().mT) > 0)
    v = torch.randn(2, f.U.shape[1], 1, generator=generator, dtype=dtype)
    accuracy = 100 * torch.finfo(dtype).eps ** 0.5
    half = LowRankFactor(f.U, f.V, torch.ones_like(f.diag))
    for there_and_back in (half.solve(half.apply(v)), half.apply_t(half.solve_t(v))):
        for one, right in zip(there_and_back, v, strict=True):
            close(one, right, accuracy)


def test_u_and_v_are_kept_in_balance_and_q_keeps_every_bit():
    f = factor_of(Case(LowRank(2), (2, 3)).group())
    f.U.mul_(2.0**20)
    f.V.mul_(2.0**-30)
    before = f.dense()
    f._balance_()
    assert torch.equal(f.dense(), before)
    assert 0.49 < torch.linalg.vector_norm(f.U) / torch.linalg.vector_norm(f.V) < 2.01


def few_large(n: int = 100, count: int = 8) -> Tensor:
    """A Hessian with a few large eigenvalues, in directions that are no axes; its condition number is 1000."""
    generator = torch.Generator().manual_seed(5)
    axes, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    values = torch.ones(n, dtype=torch.float64)
    values[:count] = torch.logspace(1, 3, count)
    return axes * values @ axes.mT


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_few_large_curvatures_are_found_whatever_their_scale(dtype: torch.dtype):
    """One Hessian on three scales, which one stack fits side by side."""
    H = few_large().to(dtype)
    scales = torch.tensor([1e-8, 1.0, 1e8], dtype=dtype)
    conditions = []
    for structure, count in ((LowRank(10), 1500), (Diagonal(), 500)):
        generator = torch.Generator().manual_seed(0)
        Q = structure.init((100,), batch=3, dtype=dtype, device="cpu")
        for step in range(count):
            dtheta = torch.randn(3, 100, generator=generator, dtype=dtype)
            Q.descend_(c3(Q, dtheta, dtheta @ H * scales[:, None]), 0.1 * (1 - step / count), MaxAbs())
        for dense, scale in zip(Q.dense().double(), scales, strict=True):
            eigenvalues = diagnostics.preconditioned_eigenvalues(dense.mT @ dense, scale * H.double())
            conditions.append((eigenvalues.max() / eigenvalues.min()).item())
    assert max(conditions[:3]) < 10
    assert min(conditions[3:]) > 500


@pytest.mark.slow
@pytest.mark.parametrize(("probe", "dtype"), [(FiniteDifference(), torch.float32), (HessianVector(), torch.float64)])
def test_a_quadratic_with_a_few_large_curvatures_is_solved_where_a_diagonal_is_slow(probe, dtype: torch.dtype):
    H = few_large().to(dtype)
    losses = []
    for structure in (LowRank(10), Diagonal()):
        theta = torch.ones(100, dtype=dtype, requires_grad=True)
        optimizer = PSGD([theta], lr=0.3, preconditioner=structure, probe=probe, precond_lr=0.05, max_norm=10.0)

        def loss_of(theta: Tensor = theta) -> Tensor:
            return theta @ H @ theta / 2

        def closure(theta: Tensor = theta, loss_of=loss_of) -> Tensor:
            theta.grad = None
            loss: Tensor = loss_of()
            loss.backward()
            return loss

        for _ in range(250):
            optimizer.step(loss_of if isinstance(probe, HessianVector) else closure)
        losses.append(loss_of().item())
    assert losses[0] < 1e-3 * losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "dtype"),
    [
        (HessianVector(), torch.float64),
        (FiniteDifference(), torch.float32),
        (FiniteDifference(), torch.bfloat16),
        (Whitening(), torch.bfloat16),
    ],
    ids=str,
)
def test_it_trains_a_network_jointly(probe, dtype: torch.dtype):
    model = small_model(dtype)
    lr = 0.02 if isinstance(probe, Whitening) else 0.1
    optimizer = PSGD(model.parameters(), lr=lr, preconditioner=LowRank(5), probe=probe, blocks=Joint(), max_norm=1.0)
    assert "rank 5 and diagonal 79" in repr(optimizer)
    losses = train(model, optimizer, 0, 200)
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert optimizer.state[model[0].weight]["Q0_U"].abs().max() > 0


@pytest.mark.slow
def test_jointly_it_beats_a_diagonal_on_a_network():
    """A network whose inputs have a large mean: its curvature in a few directions is large, and those are no axes."""
    losses = []
    for structure in (LowRank(10), Diagonal()):
        model: nn.Module = small_model(torch.float64)
        optimizer = PSGD(
            model.parameters(), lr=0.1, preconditioner=structure, probe=HessianVector(), blocks=Joint(), max_norm=1.0
        )
        for step in range(300):
            x, y = batch(step, torch.float64)

            def loss_of(x: Tensor = x, y: Tensor = y, model: nn.Module = model) -> Tensor:
                return ((model(x + 3) - y) ** 2).mean()

            optimizer.step(loss_of)
        x, y = batch(0, torch.float64, size=1000)
        losses.append(((model(x + 3) - y) ** 2).mean().item())
    assert losses[0] < losses[1]
