"""A diagonal and a change of low rank, ``Q = (I + U Vᵀ) diag(d)``, as in https://arxiv.org/abs/2211.04422.

``Q`` does not depend on a fortunate choice of coordinates: with ``r`` columns, ``U`` and ``V`` treat any ``r``
directions separately, and ``d`` scales the rest. These matrices together are not a group. However, all ``I + U Vᵀ``
with a fixed ``V`` form a group, so do those with a fixed ``U``, and so do all ``diag(d)``. ``Q`` moves within each of
these three groups: ``U`` and ``V`` multiply it from the left, ``d`` from the right.

All products cost O(n r), and the small matrix ``K = I + Vᵀ U``, which ``Q⁻¹`` needs, costs O(n r²).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..normalize import Normalization
from ..tangent import DiagonalTangent, Tangent, largest
from .base import Group, LeftFactor, Structure
from .triangular import Triangular


class LowRankTangent:
    """``E = S W Wᵀ``: the tangent of ``U`` while ``W = V`` is fixed. With ``W = U``, ``Eᵀ`` is the tangent of ``V``.

    It is stored as ``E = [x y] (W [q p])ᵀ`` with ``p = Wᵀx`` and ``q = Wᵀy``. A positive factor does not change a
    normalised step, so ``x``, ``y`` and ``W`` are first scaled to length one, so that no square over- or underflows.

    ``E`` has the eigenvalues of the small symmetric matrix ``p qᵀ + q pᵀ``, and ``I − μ E`` is invertible as long as
    the eigenvalues of ``μ E`` are below one. Eigenvalues play the part that the diagonal plays in a triangular matrix,
    so ``max_diag`` is the largest absolute eigenvalue.
    """

    def __init__(self, tangent: Tangent, W: Tensor) -> None:
        size = _length(W)
        self.per_size = torch.where(size > torch.finfo(size.dtype).tiny, 1 / size, 0.0)
        x, y = _unit(tangent.x), _unit(tangent.y)
        self.xy = torch.cat([x, y], -1)
        self.qp = (W.mT @ torch.cat([y, x], -1)) * self.per_size
        self.right = W @ (self.qp * self.per_size)

    def diagonal(self) -> Tensor:
        return (self.xy * self.right).sum(-1)

    def max_diag(self) -> Tensor:
        """Largest absolute eigenvalue, ``|p·q| + ‖p‖ ‖q‖``."""
        q, p = self.qp.unbind(-1)
        return (p * q).sum(-1).abs() + torch.linalg.vector_norm(p, dim=-1) * torch.linalg.vector_norm(q, dim=-1)

    def max_abs(self) -> Tensor:
        """Length of the longest row, and at least ``max_diag``.

        It replaces ``max|E_ij|``, which it bounds and which would cost O(n²).
        """
        squares = ((self.xy @ (self.right.mT @ self.right)) * self.xy).sum(-1)
        return torch.maximum(squares.amax(-1).clamp_min(0).sqrt(), self.max_diag())

    def spectral(self) -> Tensor:
        """``‖E‖₂``, exactly: its square is the larger eigenvalue of a product of two 2 × 2 matrices."""
        left, right = self.xy.mT @ self.xy, self.right.mT @ self.right
        half = (left * right).sum((1, 2)) / 2
        square = half + (half.square() - _det(left) * _det(right)).clamp_min(0).sqrt()
        return torch.maximum(square.sqrt(), self.max_diag())


class LowRankFactor(LeftFactor):
    """A stack of ``U (B, n, r)``, ``V (B, n, r)`` and ``d (B, n)``.

    ``d`` and the determinant of ``I + U Vᵀ`` stay positive. The diagonal of ``Q`` may become negative, so ``diagonal``
    returns ``d`` here.
    """

    parts = ("U", "V", "diag")
    one_group = False

    def __init__(self, U: Tensor, V: Tensor, diag: Tensor) -> None:
        self.U, self.V, self.diag = U, V, diag

    @classmethod
    def identity(cls, batch: int, n: int, rank: int, dtype: torch.dtype, device: torch.device | str) -> LowRankFactor:
        """Identities with ``U = 0`` and random columns in ``V``: if both were zero, neither would ever move.

        The random columns do not depend on the dtype, the device or the defaults of torch.
        """
        V = torch.empty(n, rank, dtype=dtype, device=device)
        if V.device.type != "meta":
            generator = torch.Generator("cpu").manual_seed(rank)
            V.copy_(torch.randn(n, rank, generator=generator, dtype=torch.float32, device="cpu") / n**0.5)
        return cls(
            torch.zeros(batch, n, rank, dtype=dtype, device=device),
            V.repeat(batch, 1, 1),
            torch.ones(batch, n, dtype=dtype, device=device),
        )

    @property
    def _d(self) -> Tensor:
        return self.diag[:, :, None]

    def _K(self) -> Tensor:
        """``K = I + Vᵀ U``, with ``(I + U Vᵀ)⁻¹ = I − U K⁻¹ Vᵀ`` and the same determinant; at least in float32."""
        K = (self.V.mT @ self.U).to(torch.promote_types(self.U.dtype, torch.float32))
        return K + torch.eye(K.shape[-1], dtype=K.dtype, device=K.device)

    # Products and solves of I + U Vᵀ, without diag(d).

    def _apply(self, v: Tensor) -> Tensor:
        return v + self.U @ (self.V.mT @ v)

    def _apply_t(self, v: Tensor) -> Tensor:
        return v + self.V @ (self.U.mT @ v)

    def _solve(self, v: Tensor) -> Tensor:
        return v - self.U @ _solve(self._K(), self.V.mT @ v)

    def _solve_t(self, v: Tensor) -> Tensor:
        return v - self.V @ _solve(self._K().mT, self.U.mT @ v)

    def apply(self, v: Tensor) -> Tensor:
        return self._apply(self._d * v)

    def apply_t(self, v: Tensor) -> Tensor:
        return self._d * self._apply_t(v)

    def solve(self, v: Tensor) -> Tensor:
        return self._solve(v) / self._d

    def solve_t(self, v: Tensor) -> Tensor:
        return self._solve_t(v / self._d)

    def project(self, tangent: Tangent) -> LowRankTangent:
        """Tangent that moves ``U``."""
        return LowRankTangent(tangent, self.V)

    def project_diagonal(self, tangent: Tangent) -> DiagonalTangent:
        """Tangent that moves ``d``: the diagonal of ``Q⁻¹ S Q``, in which ``d`` itself cancels."""
        x, y = tangent.x, tangent.y
        both = torch.cat([x, y], -1)
        return DiagonalTangent((self._solve(both) * self._apply_t(torch.cat([y, x], -1))).sum(-1))

    def descend_off_diagonal_(self, tangent: LowRankTangent, step: Tensor, scale: Tensor) -> None:
        """``I + U Vᵀ ← (I − step · E) (I + U Vᵀ)`` by ``U ← U − step · S V K``; the scale of ``Q`` is left to ``d``."""
        qpK = tangent.qp * tangent.per_size + self.U.mT @ tangent.right
        self.U.baddbmm_(tangent.xy, (qpK * step).mT, alpha=-1)

    def _descend_V_(self, tangent: LowRankTangent, step: Tensor) -> None:
        """``I + U Vᵀ ← (I − step · Eᵀ) (I + U Vᵀ)`` by ``V ← V − step · (I + V Uᵀ) S U``."""
        self.V.baddbmm_(self._apply_t(tangent.xy), (tangent.qp * tangent.per_size * step).mT, alpha=-1)

    def descend_(
        self, tangent: Tangent, lr: float | Tensor, normalize: Normalization, usable: Tensor, limit: float
    ) -> None:
        """Take a normalised step of ``d``, of ``U`` and then of ``V`` for every usable block; others keep their bits.

        ``d`` also takes a step within the multiples of the identity, along the trace ``2 x·y`` of ``S`` divided by its
        largest possible value. Without it, ``U`` and ``V`` would correct a wrong scale of all of ``Q`` in a few
        directions only, and keep ``d`` from correcting it in all directions.

        Steps of ``U`` and ``V`` after which solving would lose more than half of the digits are not taken.
        """
        projected = self.project_diagonal(tangent)
        d = self.diag * (1 - _step(lr, normalize(projected), usable)[:, None] * projected.diagonal())
        trace = (_unit(tangent.x) * _unit(tangent.y)).sum((1, 2))
        d *= (1 - lr * torch.where(usable, trace.clamp(-1, 1), 0.0))[:, None]
        size = largest(self.diag)
        d *= torch.where(usable & (size > limit), (limit / size).log2().floor().exp2(), 1.0)[:, None]

        new = LowRankFactor(self.U.clone(), self.V.clone(), self.diag)
        E = new.project(tangent)
        step = _step(lr, torch.maximum(normalize(E), E.max_diag()), usable)[:, None, None]
        new.descend_off_diagonal_(E, step, torch.ones_like(step))
        E = LowRankTangent(tangent, new.U)
        new._descend_V_(E, _step(lr, torch.maximum(normalize(E), E.max_diag()), usable)[:, None, None])
        new._balance_()

        most = torch.finfo(d.dtype).eps ** -0.5
        taken = (usable & (new._sensitivity() <= self._sensitivity().clamp_min(most)))[:, None, None]
        torch.where(taken, new.U, self.U, out=new.U)
        torch.where(taken, new.V, self.V, out=new.V)
        d = d.clamp_min(float(torch.finfo(d.dtype).max) ** -0.375)
        # One call copies all three, so that an interrupt never leaves a new U with an old V, whose scales may differ.
        torch._foreach_copy_([self.U, self.V, self.diag], [new.U, new.V, d])

    def flops(self, columns: int) -> tuple[float, float]:
        """FLOPs for one column: its product with ``U`` or ``V`` costs ``2 n r``, and ``K`` costs ``2 n r²``.

        ``a`` and ``b`` are 4 such products and a ``K``; the step of ``d`` is 8 and a ``K``; the steps of ``U`` and
        ``V`` are 18 and, to check whether they can be taken, 2 ``K``. The norm of either costs ``16 n``.
        """
        n, r = self.U.shape[1:]
        return 60 * n * r + 8 * n * r * r + 32 * n, 8 * n * r

    def _sensitivity(self) -> Tensor:
        """Bound on the errors of ``(I + U Vᵀ)⁻¹`` relative to one, in units of rounding.

        It is infinite if the determinant is not positive, which rounding may cause when ``lr`` is almost one.
        """
        K = self._K()
        inverse = torch.linalg.inv_ex(K)[0]
        size = ((1 + _length(self.U) * _length(self.V)) * (1 + _length(inverse)))[:, 0, 0]
        return torch.where(torch.linalg.slogdet(K)[0] > 0, size, torch.inf)

    def _balance_(self) -> None:
        """Scale ``U`` and ``V`` to nearly the same length, by powers of two, so that ``U Vᵀ`` keeps every bit."""
        ratio = _length(self.V) / _length(self.U)
        exponent = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio.log2() / 2, 0.0).round()
        self.U.mul_(exponent.exp2())
        self.V.mul_((-exponent).exp2())

    def random_(self, generator: torch.Generator) -> None:
        """Fill as the base class does, but with ``‖U‖ ‖V‖ = ½``: the determinant of ``I + U Vᵀ`` is then positive."""
        super().random_(generator)
        self.U.div_(2 * _length(self.U) * _length(self.V))
        self._balance_()

    def diagonal(self) -> Tensor:
        return self.diag

    def set_diagonal_(self, values: Tensor) -> None:
        self.diag.copy_(values)

    def dense(self) -> Tensor:
        return self.apply(torch.eye(self.diag.shape[-1], dtype=self.diag.dtype, device=self.diag.device))

    def fault(self) -> tuple[Sequence[str], str] | None:
        if super().fault() is not None:
            return ("diag",), "it is not positive"
        if not bool((torch.linalg.slogdet(self._K())[0] > 0).all()):
            return ("U", "V"), "the determinant of I + U Vᵀ is not positive"
        return None

    def describe(self) -> str:
        return f"rank {self.U.shape[-1]} and diagonal {self.diag.shape[-1]}"


def _solve(K: Tensor, v: Tensor) -> Tensor:
    """``K⁻¹ v``, by a variant of ``torch.linalg.solve`` that does not make the host wait for the device."""
    solution: Tensor = torch.linalg.solve_ex(K, v.to(K.dtype))[0]
    return solution.to(v.dtype)


def _length(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True)


def _unit(v: Tensor) -> Tensor:
    size = _length(v)
    return v / torch.where(size > 0, size, 1.0)


def _det(m: Tensor) -> Tensor:
    return m[:, 0, 0] * m[:, 1, 1] - m[:, 0, 1] * m[:, 1, 0]


def _step(lr: float | Tensor, norm: Tensor, usable: Tensor) -> Tensor:
    """``lr / norm`` for usable blocks, and zero for others; a tangent with a norm below 2⁻²⁰ is mostly rounding."""
    return torch.where(usable & (norm > 0), lr / norm.clamp_min(2.0**-20), 0.0)


@dataclass(frozen=True)
class LowRank(Structure):
    """A diagonal ``Q`` with a change of low rank, ``Q = (I + U Vᵀ) diag(d)``.

    It suits problems with a few large curvatures in directions that are not parallel to the axes. For a block of n
    elements, ``Q`` has ``(2 rank + 1) n`` numbers. A block of at most ``2 rank + 1`` elements gets a dense ``Q``, which
    uses no more memory.

    ``MaxDiag``, ``MaxAbs`` and ``Spectral`` normalise the steps of ``U`` and ``V`` by the largest eigenvalue, the
    longest row and the spectral norm of the tangent. In this order, they go from the largest to the smallest steps.

    Args:
        rank: number of columns of ``U`` and ``V``
    """

    rank: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank={self.rank!r}: LowRank wants a whole number of at least 1 (Diagonal() is rank 0)")

    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        n = math.prod(shape)
        if n <= 2 * self.rank + 1:
            return Group((n,), [Triangular.identity(batch, n, dtype, device)])
        return Group((n,), [LowRankFactor.identity(batch, n, self.rank, dtype, device)])
