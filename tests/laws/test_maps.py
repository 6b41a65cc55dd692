"""Laws of ``Q`` as a linear map."""

from __future__ import annotations

import torch
from torch import Tensor

from psgd import Kronecker

from ..cases import Case
from .suite import law

EXACT = {"rtol": 1e-9, "atol": 1e-10}


def times(matrices: Tensor, v: Tensor) -> Tensor:
    """A stack of matrices times flattened blocks."""
    return (matrices @ v.reshape(len(v), -1, 1)).reshape(v.shape)


@law()
def test_it_starts_from_the_identity(case: Case):
    group = case.structure.init(case.shape, batch=2, dtype=torch.float64, device="cpu")
    n = case.vectors()[0].numel()
    assert torch.equal(group.dense(), torch.eye(n, dtype=torch.float64).expand(2, n, n))


@law()
def test_maps_are_those_of_the_dense_matrix(case: Case):
    group, (v,) = case.group(batch=2), case.vectors(batch=2)
    Q = group.dense()
    inverse = torch.linalg.inv(Q)
    for ours, matrices in [
        (group.apply, Q),
        (group.apply_t, Q.mT),
        (group.solve, inverse),
        (group.solve_t, inverse.mT),
        (group.precondition, Q.mT @ Q),
    ]:
        result = ours(v)
        assert result.shape == v.shape
        torch.testing.assert_close(result, times(matrices, v), **EXACT)


@law()
def test_solve_undoes_apply(case: Case):
    group, (v,) = case.group(), case.vectors()
    torch.testing.assert_close(group.solve(group.apply(v)), v, **EXACT)
    torch.testing.assert_close(group.solve_t(group.apply_t(v)), v, **EXACT)


@law()
def test_apply_t_is_the_adjoint_of_apply(case: Case):
    group, (u, v) = case.group(), case.vectors(2)
    torch.testing.assert_close((group.apply(u) * v).sum(), (u * group.apply_t(v)).sum(), **EXACT)
    torch.testing.assert_close((group.solve(u) * v).sum(), (u * group.solve_t(v)).sum(), **EXACT)


@law()
def test_preconditioner_is_positive_definite(case: Case):
    Q = case.group().dense()[0]
    assert torch.linalg.eigvalsh(Q.mT @ Q).min() > 0


@law()
def test_coordinates_are_those_that_the_group_says(case: Case):
    """``a = Q δg`` and ``b = Q⁻ᵀ δθ`` for ``dQ = E Q``; in the coordinates ``dQ = Q^½ E Q^1.5`` ``P δg`` and ``δθ``."""
    group, (dtheta, dgrad) = case.group(batch=2), case.vectors(2, batch=2)
    Q = group.dense()
    a, b = (Q, torch.linalg.inv(Q).mT) if case.left else (Q.mT @ Q, torch.eye(Q.shape[1], dtype=torch.float64))
    torch.testing.assert_close(group.a(dgrad), times(a, dgrad), **EXACT)
    torch.testing.assert_close(group.b(dtheta), times(b, dtheta), **EXACT)


@law(keep=[False, True])
def test_parts_of_the_preconditioned_gradient_multiply_to_it(case: Case, keep: bool):
    """Whoever asks owns the result, and the gradient stays as it is."""
    group, (g,) = case.group(batch=3), case.vectors(batch=3)
    right, before = group.precondition(g), g.clone()
    out = torch.empty(3, *group.dims, dtype=torch.float64)
    for place in (None, out):
        v, scale = group.precondition_parts(g, keep, place)
        torch.testing.assert_close((v if scale is None else v * scale).reshape(g.shape), right, **EXACT)
        assert place is None or v.data_ptr() == out.data_ptr()
        v.mul_(3)
        assert torch.equal(g, before)


@law()
def test_p_of_a_factor_is_its_square(case: Case):
    for factor in case.group(batch=2).factors:
        Q, P = factor.dense(), factor.P()
        torch.testing.assert_close(P if P.ndim == 3 else P.diag_embed(), Q.mT @ Q, **EXACT)


@law()
def test_the_tensors_of_a_group_are_all_of_it(case: Case):
    """Bound to copies it is the same group, and without memory it tells the same of itself."""
    group, (v,) = case.group(batch=2), case.vectors(batch=2)
    copy = group.bind({name: buffer.clone() for name, buffer in group.buffers().items()})
    assert type(copy) is type(group)
    assert torch.equal(copy.dense(), group.dense())
    assert torch.equal(copy.precondition(v), group.precondition(v))
    template = case.structure.init(case.shape, batch=2, dtype=torch.float64, device="meta")
    assert template.nbytes() == group.nbytes() == sum(buffer.nbytes for buffer in group.buffers().values())
    assert template.describe() == group.describe()


@law()
def test_random_elements_use_all_numbers_that_there_are(case: Case):
    """Otherwise the other laws would say less than they seem to. The same seed gives the same element."""
    group, other = case.group(batch=2), case.group(batch=2, seed=1)
    assert torch.equal(group.dense(), case.group(batch=2).dense())
    for name, buffer in group.buffers().items():
        again = other.buffers()[name]
        assert torch.all((buffer != again) == (buffer[:1] != 0))
        assert torch.all((buffer[0] != buffer[1]) == (buffer[0] != 0))


def test_meta_groups_take_no_memory_and_tell_their_size():
    group = Kronecker().init((300, 200), batch=3, dtype=torch.float32, device="meta")
    assert group.nbytes() == 3 * 4 * (300**2 + 200**2)
    assert group.describe() == "symmetric 300 ⊗ symmetric 200"
