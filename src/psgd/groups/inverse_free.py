"""Kronecker factors that are fitted with matrix products only: no triangular solves, which are slow on GPUs.

A step ``dQ = Q^½ E Q^1.5`` (arXiv:2402.11858) with ``Q = Qᵀ`` sees a change of the gradient as ``a = P δg`` and one of
the parameters as ``b = δθ``. So for criterion 3 ``Q ← Q − μ (a aᵀ − b bᵀ) Q``, and nothing is ever inverted. Each
step turns ``Q`` a little out of symmetry; a small rotation, which ``P = QᵀQ`` does not see, turns it back.

Of the coordinates in that paper this one fits best or nearly so, and best in bfloat16: ``psgd bench fit``.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import descend_
from ..normalize import Normalization
from ..tangent import Tangent, largest
from .axes import along, gram_, low, multiply_axes
from .base import Factor, Group
from .diagonal import DiagonalFactor

#: Of so many updates of ``Q`` each is of one kind, see ``Chores``.
KINDS = 8


class Chores(NamedTuple):
    """What need not be done at every update: each takes a product of n × n matrices."""

    #: whether ``Q`` is turned back to symmetry, and the factors of a block are balanced
    tidy: bool
    #: times the damping of the probe
    damping: float

    @classmethod
    def of(cls, number: int) -> Chores:
        """One of ``KINDS`` updates tidies up, and every second one has twice the variance of the damping."""
        kind = number % KINDS
        return cls(tidy=kind == 0, damping=2**0.5 * (kind % 2))


#: of an update that may be the only one
ALL_CHORES = Chores(tidy=True, damping=1.0)


class NearSymmetric(Factor):
    """A stack of matrices ``Q ≈ Qᵀ``, ``(B, n, n)``."""

    parts = ("root",)

    def __init__(self, root: Tensor) -> None:
        self.root = root
        self._kept: tuple[int, Tensor] | None = None

    @classmethod
    def identity(cls, batch: int, n: int, dtype: torch.dtype, device: torch.device | str) -> NearSymmetric:
        Q = cls(torch.zeros(batch, n, n, dtype=dtype, device=device))
        Q.diagonal().fill_(1)
        return Q

    def apply(self, v: Tensor) -> Tensor:
        return self.root @ v

    def apply_t(self, v: Tensor) -> Tensor:
        return self.root.mT @ v

    def P(self) -> Tensor:
        return torch.bmm(self.root.mT, self.root)

    def kept_P(self) -> Tensor:
        """``P``, which is kept until ``Q`` changes: where updates are rare, forming it pays. It stays at its place."""
        if not self.keeps_P():
            P = self.root.new_empty(self.root.shape) if self._kept is None else self._kept[1]
            self._kept = (self.root._version, torch.bmm(self.root.mT, self.root, out=P))
        assert self._kept is not None
        return self._kept[1]

    def keeps_P(self) -> bool:
        """Whether the ``P`` that is kept is that of today's ``Q``."""
        return self._kept is not None and self._kept[0] == self.root._version

    def forget_P(self) -> None:
        """Have it formed anew, at its place, when it is asked for."""
        if self._kept is not None:
            self._kept = (-1, self._kept[1])

    def confirm_P(self) -> None:
        """What is kept is that of today's ``Q``: it was formed without Python's knowing."""
        if self._kept is not None:
            self._kept = (self.root._version, self._kept[1])

    def solve(self, v: Tensor) -> Tensor:
        """Not for training: only criterion 1 and the diagnostics ask for it."""
        return _solve(self.root, v)

    def solve_t(self, v: Tensor) -> Tensor:
        return _solve(self.root.mT, v)

    def diagonal(self) -> Tensor:
        return self.root.diagonal(dim1=1, dim2=2)

    def set_diagonal_(self, values: Tensor) -> None:
        self.diagonal().copy_(values)

    def dense(self) -> Tensor:
        return self.root

    def describe(self) -> str:
        return f"symmetric {self.root.shape[-1]}"


class InverseFree(Group):
    """A Kronecker product of near-symmetric and diagonal factors, in the coordinates ``dQ = Q^½ E Q^1.5``.

    ``Whitener`` whitens many such groups at once, without random numbers.
    """

    @cached_property
    def long(self) -> int | None:
        """The first axis with a diagonal factor, where others have dense ones."""
        diagonals = [i for i, factor in enumerate(self.factors) if isinstance(factor, DiagonalFactor)]
        return diagonals[0] if diagonals and len(diagonals) < len(self.factors) else None

    def a(self, dgrad: Tensor) -> Tensor:
        return self.precondition(dgrad)

    def b(self, dtheta: Tensor) -> Tensor:
        return dtheta

    def precondition(self, g: Tensor) -> Tensor:
        v, scale = self.precondition_parts(g)
        return (v if scale is None else v * scale).reshape(g.shape)

    def precondition_parts(
        self, g: Tensor, keep: bool = False, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A long diagonal factor is left to be multiplied with what else scales the step: that saves a pass."""
        matrices: list[tuple[Tensor, int]] = []
        for axis, factor in enumerate(self.factors):
            if isinstance(factor, NearSymmetric) and keep:
                matrices.append((factor.kept_P(), axis))
            elif isinstance(factor, NearSymmetric) and math.prod(self.dims) <= self.dims[axis] ** 2:
                matrices += [(factor.root, axis), (factor.root.mT, axis)]
            elif axis != self.long:
                matrices.append((factor.P(), axis))
        v = multiply_axes(matrices, g.reshape(g.shape[0], *self.dims), out)
        return v, None if self.long is None else along(self.factors[self.long].P(), v, self.long)

    def descend_(
        self,
        tangent: Tangent,
        lr: float | Tensor,
        normalize: Normalization | None = None,
        usable: Tensor | None = None,
    ) -> None:
        """``Q_i ← (I − lr / L · S_i) Q_i``, where ``L`` bounds ``‖a aᵀ‖ + ‖b bᵀ‖`` and so ``‖S_i‖``.

        As the size of the step is not normalised by ``S`` itself, it vanishes with ``S``: on a fixed Hessian ``Q``
        converges. Criteria without such a difference are normalised by ``‖S_i‖``.
        """
        count = tangent.x.shape[0]
        x, y = (v.reshape(count, *self.dims) for v in (tangent.x, tangent.y))
        if tangent.is_difference:
            y.mul_(0.5)
        else:
            # x yᵀ + y xᵀ = (p pᵀ − m mᵀ) / 2 for p, m = x ± y, best conditioned where x and y are of one size
            x, y = (v / along(largest(v).clamp_min(torch.finfo(v.dtype).tiny), v) for v in (x, y))
        plus = x + y
        minus = y.sub_(x)
        # They will be squared: keep them within the range of the number format.
        size = torch.maximum(largest(plus), largest(minus))
        fine = torch.isfinite(size) & (size > 0)
        usable = fine if usable is None else usable & fine
        for v in (plus, minus):
            v.div_(along(torch.where(fine, size, 1.0), v))
        for axis, factor in enumerate(self.factors):
            _descend_factor_(factor, gram(plus, axis, factor), gram(minus, axis, factor), tangent, lr, usable)
        self._balance_(usable)

    def flops(self, update_every: int = 1) -> list[float]:
        """For each factor what a step of one block takes on average where ``Whitener`` fits it, with c3.

        A dense factor along an axis of n, of a block of N elements, takes at an update ``4 n³`` for ``P`` and the step
        of ``Q``, ``4 n N`` for ``P g`` and its Gram matrix, ``4 n²`` for the norm of that, at every second update
        ``2 n³`` for the damping, and at one of ``KINDS`` as much for turning ``Q`` back. Between updates ``P g`` takes
        ``2 n N``, and ``P``, found once, ``2 n³``. A diagonal factor has a product and a sum of squares of N elements,
        ``3 N``, and ``7 n`` for itself.
        """
        numel = math.prod(self.dims)
        between = update_every - 1
        each = []
        for n, factor in zip(self.dims, self.factors, strict=True):
            if isinstance(factor, NearSymmetric):
                update = 5 * n**3 + 4 * n * numel + 4 * n**2 + 2 * n**3 / KINDS
                precondition = 2 * n**3 * (between > 0) + 2 * n * numel * between
            else:
                update = 3 * numel + 7 * n
                precondition = (numel + n) * between
            each.append((update + precondition) / update_every)
        return each

    def _balance_(self, usable: Tensor) -> None:
        super()._balance_(usable)
        for factor in self.factors:
            size = factor.diagonal().abs().amax(-1)
            limit = self.limit(size.dtype)
            scale = torch.where(usable & (size > limit), (limit / size).log2().floor().exp2(), 1.0)
            for buffer in factor.buffers().values():
                buffer.mul_(along(scale, buffer))


def _descend_factor_(
    factor: Factor, plus: Tensor, minus: Tensor, tangent: Tangent, lr: float | Tensor, usable: Tensor
) -> None:
    bound = norm_(plus)[0] + norm_(minus)[0]
    S = plus.sub_(minus)
    del minus
    if not tangent.is_difference:
        bound = norm_(S)[0]
    frobenius = torch.linalg.vector_norm(S.flatten(1), dim=1)
    bound = torch.maximum(bound, frobenius * safe(lr)).to(S.dtype)
    step = torch.where(usable & torch.isfinite(bound) & (bound > 0), lr / bound, 0.0).to(S.dtype)
    if isinstance(factor, NearSymmetric):
        move_(factor.root, S, step)
        del S
        turn_(factor.root, step > 0)
    else:
        S = (S * step[:, None]).masked_fill_((step == 0)[:, None], 0)
        factor.set_diagonal_(factor.diagonal() * (1 - S))


def gram(v: Tensor, axis: int, factor: Factor) -> Tensor:
    """``V Vᵀ``, or for a diagonal factor its diagonal."""
    n = v.shape[axis + 1]
    dense = isinstance(factor, NearSymmetric)
    out = v.new_empty((v.shape[0], n, n) if dense else (v.shape[0], n))
    gram_(v, axis, out)
    return out if dense else out.square_()


def norm_(S: Tensor, iterations: int = 2) -> tuple[Tensor, Tensor]:
    """An estimate of ``‖S‖₂``, never over it, by power iteration from the longest column; and ``‖S‖²_F``.

    In float32 or better. Exact for diagonals.
    """
    dtype = torch.promote_types(S.dtype, torch.float32)
    if S.ndim == 2:
        return largest(S).to(dtype), S.to(dtype).square().sum(1)
    lengths = torch.linalg.vector_norm(S, dim=1, dtype=dtype)
    longest, index = lengths.max(1)
    v = S.gather(2, index.view(-1, 1, 1).expand(-1, S.shape[1], 1))
    norm = longest
    for _ in range(iterations):
        v = torch.bmm(S, v / norm.clamp_min(torch.finfo(dtype).tiny).to(S.dtype).view(-1, 1, 1))
        norm = torch.linalg.vector_norm(v, dim=(1, 2), dtype=dtype)
    return torch.maximum(norm, longest), lengths.square_().sum(1)


def safe(lr: float | Tensor) -> float | Tensor:
    """How much of ``‖S‖_F`` the step is at least normalised by, whatever the estimate of ``‖S‖₂`` has missed.

    Then ``lr ‖S‖ / L < 2``, so that no direction of ``Q`` is ever stretched by overshooting; and for step sizes near
    one, where an estimate that is a little short would be enough to turn a direction around, ``lr ‖S‖ / L < 1``.
    """
    return 1.25 * lr * (lr.clamp_min(0.5) if isinstance(lr, Tensor) else max(lr, 0.5))


def move_(Q: Tensor, S: Tensor, step: Tensor) -> None:
    """``Q ← Q − step · S Q``; where the step is zero, ``Q`` keeps its bits."""
    # A tangent that overflowed has a step of zero, but is not zero itself.
    descend_(Q, torch.bmm(low(S), low(Q)), step)


def turn_(Q: Tensor, usable: Tensor) -> None:
    """Turn ``Q`` back towards symmetry, where ``usable`` (B).

    Among all rotations of ``Q`` the symmetric one has the largest trace (Procrustes), and ``R = Qᵀ − Q`` points there.
    ``Q + t R Q`` with the ``t`` of the largest trace is that rotation to first order, as ``t`` is small.
    """
    dtype = torch.promote_types(Q.dtype, torch.float32)
    R = Q - Q.mT  # with the other sign, as `descend_` subtracts
    size = torch.linalg.vector_norm(R.flatten(1), dim=1, dtype=dtype)
    RQ = torch.bmm(R, Q)
    slope = size.square() / 2  # the trace of R Q
    bend = R.mul_(RQ).flatten(1).sum(1, dtype=dtype)  # minus the trace of R R Q
    # R is antisymmetric, its singular values come in pairs: ‖R‖ is at most that of its elements over √2.
    t = torch.minimum(slope / bend, 0.5 * 2**0.5 / size)
    descend_(Q, RQ, torch.where(usable & (bend > 0), t, 0.0))


def _solve(M: Tensor, v: Tensor) -> Tensor:
    dtype = torch.promote_types(M.dtype, torch.float32)
    return torch.linalg.solve(M.to(dtype), v.to(dtype)).to(v.dtype)
