"""Numbers that describe ``Q`` in reports: the condition number of a factor, and how far ``Q`` has moved."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.power import power_iteration
from ..tangent import largest
from .base import Factor, Group
from .diagonal import DiagonalFactor
from .low_rank import LowRankFactor
from .near_symmetric import NearSymmetric

#: largest sizes for which singular values are computed exactly, on a CPU and elsewhere; estimates would cost as much
EXACT, EXACT_ELSEWHERE = 256, 32
#: number of products of the estimate for larger matrices, and number of its start vectors
ITERATIONS, STARTS = 16, 4
#: largest number of elements of the matrices that are decomposed at a time
AT_ONCE = 2**24


def condition(factor: Factor) -> Tensor:
    """``σ_max / σ_min`` of each matrix of a stack, shape ``(B,)``.

    It is exact for diagonals and for small matrices, see ``EXACT``. For larger ones it is an estimate by power
    iteration with ``QᵀQ`` and with its inverse, which except for rounding is never too large. The inverse of an
    inverse-free factor costs one LU decomposition, a ninth of the work of its update; other factors have a ``solve``.
    """
    if isinstance(factor, DiagonalFactor):
        return largest(factor.diag) / factor.diag.abs().amin(1)
    n = factor.diagonal().shape[-1]
    if n <= (EXACT if factor.diagonal().device.type == "cpu" else EXACT_ELSEWHERE):
        Q = factor.dense()
        values = torch.linalg.svdvals(Q.to(torch.promote_types(Q.dtype, torch.float32)))
        return values[:, 0] / values[:, -1]
    if not isinstance(factor, NearSymmetric):
        return _estimate(factor, factor)
    some = max(1, AT_ONCE // n**2)
    parts = factor.root.split(some)
    dtype = torch.promote_types(factor.root.dtype, torch.float32)
    return torch.cat([_estimate(NearSymmetric(part), _Inverse(part.to(dtype))) for part in parts])


class _Inverse:
    """Inverse of a stack of matrices, by one LU decomposition."""

    def __init__(self, Q: Tensor) -> None:
        self.LU, self.pivots, _ = torch.linalg.lu_factor_ex(Q)

    def solve(self, v: Tensor) -> Tensor:
        return torch.linalg.lu_solve(self.LU, self.pivots, v.to(self.LU.dtype))

    def solve_t(self, v: Tensor) -> Tensor:
        return torch.linalg.lu_solve(self.LU, self.pivots, v.to(self.LU.dtype), adjoint=True)


def _estimate(Q: Factor, inverse: Factor | _Inverse) -> Tensor:
    like = Q.diagonal()
    # Pseudorandom vectors, computed on the device from integers, which have no rounding errors.
    i = torch.arange(1, like.shape[1] * STARTS + 1, device=like.device)
    words = (i * i) % 1000003 * 2654435761 % 2**32
    start = (words.to(torch.float32) / 2**32 - 0.5).view(1, -1, STARTS).expand(len(like), -1, -1).to(like.dtype)
    _, highest = power_iteration(lambda v: Q.apply_t(Q.apply(v)), start, ITERATIONS)
    _, lowest = power_iteration(lambda v: inverse.solve(inverse.solve_t(v)), start, ITERATIONS)
    return (highest.amax((1, 2)) * lowest.amax((1, 2))).sqrt()


def change(new: Group, old: Group) -> Tensor:
    """``‖Q_new − Q_old‖ / ‖Q_old‖`` in the Frobenius norm, for each block of a stack.

    The norm of a Kronecker product is the product of the norms, so ``Q`` itself is not formed. Scale that ``descend_``
    moves between the factors by powers of two does not count as a change.
    """
    dtype = _wide(new)
    squares = inner = torch.ones((), dtype=dtype, device=new.factors[0].diagonal().device)
    alone = len(new.factors) == 1
    for factor, before in zip(new.factors, old.factors, strict=True):
        if isinstance(factor, LowRankFactor) and isinstance(before, LowRankFactor):
            along, square = _low_rank(factor, before, dtype)
        else:
            along, square = _parts(factor, before)
        if alone:
            return square.sqrt()
        squares = squares.to(along) * (1 + 2 * along + square)
        inner = inner.to(along) * (1 + along)
    return (squares - 2 * inner + 1).clamp_min(0).sqrt()


def _wide(group: Group) -> torch.dtype:
    device = group.factors[0].diagonal().device
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def _parts(new: Factor, old: Factor) -> tuple[Tensor, Tensor]:
    """``⟨D, Q_old⟩ / ‖Q_old‖²`` and ``‖D‖² / ‖Q_old‖²`` for ``D = Q_new − Q_old``, after a power of two is undone.

    This holds for factors that store every element of their matrix once.
    """
    pairs = [(v.flatten(1), old.buffers()[name].flatten(1)) for name, v in new.buffers().items()]
    narrow = torch.promote_types(pairs[0][0].dtype, torch.float32)
    wide = torch.float32 if pairs[0][0].device.type == "mps" else torch.float64
    sizes = [sum(v.to(narrow).square().sum(1, dtype=wide) for v in side) for side in zip(*pairs, strict=True)]
    ratio = (sizes[0] / sizes[1]).sqrt().log2().round().exp2()
    along = square = torch.zeros_like(sizes[1])
    for v, before in pairs:
        D = v.to(narrow) / ratio.to(narrow)[:, None] - before
        along = along + (D * before).sum(1, dtype=wide)
        square = square + D.square_().sum(1, dtype=wide)
    return along / sizes[1], square / sizes[1]


def _low_rank(new: LowRankFactor, old: LowRankFactor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of ``_parts`` for ``Q = diag(d) + U Wᵀ`` with ``W = diag(d) V``, by products of thin matrices."""
    (d, U, W), (e, A, B) = (
        (f.diag.to(dtype), f.U.to(dtype), f.V.to(dtype) * f.diag.to(dtype)[:, :, None]) for f in (new, old)
    )

    def inner(d: Tensor, U: Tensor, W: Tensor, e: Tensor, A: Tensor, B: Tensor) -> Tensor:
        beside = (d * (A * B).sum(-1)).sum(1) + (e * (U * W).sum(-1)).sum(1)
        return (d * e).sum(1) + beside + ((U.mT @ A) * (W.mT @ B)).sum((1, 2))

    D = (d - e, torch.cat([U, -A], -1), torch.cat([W, B], -1))
    size = inner(e, A, B, e, A, B)
    return inner(*D, e, A, B) / size, inner(*D, *D).clamp_min(0) / size
