"""Near-symmetric matrices: dense Kronecker factors that are fitted with matrix products only.

A step ``dQ = Q^½ E Q^1.5`` (arXiv:2402.11858) with ``Q = Qᵀ`` sees a change of the gradient as ``a = P δg`` and one of
the parameters as ``b = δθ``. So for criterion 3 ``Q ← Q − μ (a aᵀ − b bᵀ) Q``, and nothing is ever inverted. Each
step turns ``Q`` a little out of symmetry; a small rotation, which ``P = QᵀQ`` does not see, turns it back.

Of the coordinates in that paper this one fits best or nearly so, and best in bfloat16: ``psgd bench fit``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.factors import asymmetry, descend_
from ..ops.power import power_iteration
from ..tangent import largest
from .axes import low
from .base import Factor
from .factor import normal_like


class NearSymmetric(Factor):
    """A stack of matrices ``Q ≈ Qᵀ``, ``(B, n, n)``."""

    parts = ("root",)
    one_group = False

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
        """``P``, kept at one address until ``Q`` changes: forming it pays if updates are rare."""
        if not self.keeps_P():
            P = self.root.new_empty(self.root.shape) if self._kept is None else self._kept[1]
            self._kept = (self.root._version, torch.bmm(self.root.mT, self.root, out=P))
        assert self._kept is not None
        return self._kept[1]

    def keeps_P(self) -> bool:
        """Whether the kept ``P`` is that of the current ``Q``."""
        return self._kept is not None and self._kept[0] == self.root._version

    def forget_P(self) -> None:
        """Mark the kept ``P`` as outdated; it is computed again, in place, when it is needed."""
        if self._kept is not None:
            self._kept = (-1, self._kept[1])

    def confirm_P(self) -> None:
        """Mark the kept ``P`` as that of the current ``Q``, after a replayed CUDA graph computed it."""
        if self._kept is not None:
            self._kept = (self.root._version, self._kept[1])

    def solve(self, v: Tensor) -> Tensor:
        """``Q⁻¹ v`` by a general solve, which only criterion 1 and the diagnostics use, not ordinary training."""
        return _solve(self.root, v)

    def solve_t(self, v: Tensor) -> Tensor:
        return _solve(self.root.mT, v)

    def random_(self, generator: torch.Generator) -> None:
        """Become ``exp(R) exp(A)`` with a random symmetric ``A`` and a smaller antisymmetric ``R``."""
        A, R = (normal_like(self.root, generator) / self.root.shape[-1] ** 0.5 for _ in range(2))
        self.root.copy_(torch.matrix_exp((R - R.mT) * 0.1) @ torch.matrix_exp((A + A.mT) * 0.2))

    def diagonal(self) -> Tensor:
        return self.root.diagonal(dim1=1, dim2=2)

    def set_diagonal_(self, values: Tensor) -> None:
        self.diagonal().copy_(values)

    def dense(self) -> Tensor:
        return self.root

    def describe(self) -> str:
        return f"symmetric {self.root.shape[-1]}"


class Norms(NamedTuple):
    """Norms of a stack of symmetric matrices ``S``, in float32 or better."""

    #: estimate of ``‖S‖₂``, never over it, ``(B,)``
    largest: Tensor
    #: ``‖S‖²_F``, ``(B,)``
    square: Tensor
    #: direction that ``S`` stretches most, of any length, ``(B, n, 1)``; None for diagonals
    direction: Tensor | None


def norm_(S: Tensor, iterations: int = 2) -> Norms:
    """Norms of symmetric matrices, by power iteration from the longest row; of diagonals they are exact."""
    dtype = torch.promote_types(S.dtype, torch.float32)
    if S.ndim == 2:
        return Norms(largest(S).to(dtype), S.to(dtype).square().sum(1), None)
    lengths = torch.linalg.vector_norm(S, dim=2, dtype=dtype)
    longest, index = lengths.max(1)
    row = S.gather(1, index.view(-1, 1, 1).expand(-1, 1, S.shape[1])).mT
    v, norm = power_iteration(lambda v: torch.bmm(S, v), row, iterations, longest.view(-1, 1, 1))
    return Norms(torch.maximum(norm.view(-1), longest), lengths.square_().sum(1), v)


def safe(lr: float | Tensor) -> float | Tensor:
    """Share of ``‖S‖_F`` by which a step is at least normalised, whatever the estimate of ``‖S‖₂`` has missed.

    Then ``lr ‖S‖ / L < 2``, so that no direction of ``Q`` is ever stretched by overshooting; and for step sizes near
    one, where an estimate that is a little short would be enough to turn a direction around, ``lr ‖S‖ / L < 1``.
    """
    return 1.25 * lr * (lr.clamp_min(0.5) if isinstance(lr, Tensor) else max(lr, 0.5))


def move_(Q: Tensor, S: Tensor, step: Tensor, rounded: Tensor | None = None, room: Tensor | None = None) -> None:
    """``Q ← Q − step · S Q``; where the step is zero, ``Q`` keeps its bits.

    Args:
        Q: ``(B, n, n)``
        S: ``(B, n, n)``
        step: ``(B,)``
        rounded: ``Q`` in the dtype of estimates, if it is known
        room: memory for the product, or None
    """
    S, rounded = low(S), low(Q) if rounded is None else rounded
    if room is not None and room.dtype != S.dtype:
        room = None
    # A tangent that overflowed has a step of zero, but is not zero itself.
    descend_(Q, torch.bmm(S, rounded, out=room), step)


def move_along_(Q: Tensor, a: Tensor, rounded: Tensor, step: Tensor, diagonal: Tensor) -> None:
    """``Q ← Q − step · (a aᵀ − D) Q`` for ``a`` with few columns, without forming ``a aᵀ``.

    With c columns, ``a (aᵀ Q)`` costs ``4 n² c``, where ``a aᵀ`` and its product with ``Q`` cost ``2 n² c + 2 n³``.

    Args:
        Q: ``(B, n, n)``
        a: ``(B, n, c)``, in the dtype of estimates
        rounded: ``Q`` in the dtype of ``a``
        step: ``(B,)``
        diagonal: diagonals of ``D``, ``(B, n)`` or ``(B, 1)``
    """
    descend_(Q, torch.bmm(a, torch.bmm(a.mT, rounded)), step, diagonal)


def turn_(Q: Tensor, usable: Tensor) -> None:
    """Turn ``Q`` back towards symmetry, where ``usable`` (B).

    Among all rotations of ``Q`` the symmetric one has the largest trace (Procrustes), and ``R = Qᵀ − Q`` points there.
    ``Q + t R Q`` with the ``t`` of the largest trace is that rotation to first order, as ``t`` is small.
    """
    dtype = torch.promote_types(Q.dtype, torch.float32)
    R = asymmetry(Q)  # with the other sign, as `descend_` subtracts
    size = torch.linalg.vector_norm(R.flatten(1), dim=1, dtype=dtype)
    RQ = torch.bmm(low(R), low(Q))
    slope = size.square() / 2  # the trace of R Q
    bend = R.mul_(RQ).flatten(1).sum(1, dtype=dtype)  # minus the trace of R R Q
    # R is antisymmetric, so its singular values come in pairs: ‖R‖₂ is at most ‖R‖_F / √2.
    t = torch.minimum(slope / bend, 0.5 * 2**0.5 / size)
    descend_(Q, RQ, torch.where(usable & (bend > 0), t, 0.0))


def _solve(M: Tensor, v: Tensor) -> Tensor:
    dtype = torch.promote_types(M.dtype, torch.float32)
    return torch.linalg.solve(M.to(dtype), v.to(dtype)).to(v.dtype)
