"""What ``Q`` is: a stack of elements of a Lie group of matrices, written as a Kronecker product of factors.

A dense, a limited-memory and a diagonal ``Q`` are products of one factor; a Kronecker ``Q`` has one factor for each
axis of its block. A factor knows how a single matrix is stored; ``Group`` knows the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..normalize import MaxAbs, Normalization, Projected
from ..tangent import Tangent, fold, largest, unfold


class Factor(ABC):
    """A stack of B matrices ``Q`` of size n×n.

    The linear maps take and return arrays of shape ``(B, n, k)``.
    """

    #: names of the constructor's arguments, the tensors that hold ``Q``
    parts: tuple[str, ...]

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """``Q v``"""

    @abstractmethod
    def apply_t(self, v: Tensor) -> Tensor:
        """``Qᵀ v``"""

    @abstractmethod
    def solve(self, v: Tensor) -> Tensor:
        """``Q⁻¹ v``"""

    @abstractmethod
    def solve_t(self, v: Tensor) -> Tensor:
        """``Q⁻ᵀ v``"""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of ``Q``, shape ``(B, n)``."""

    @abstractmethod
    def set_diagonal_(self, values: Tensor) -> None: ...

    @abstractmethod
    def dense(self) -> Tensor:
        """``Q`` itself, shape ``(B, n, n)``: for tests and small problems."""

    @abstractmethod
    def describe(self) -> str: ...

    def P(self) -> Tensor:
        """``QᵀQ``, shape ``(B, n, n)``; of diagonal factors the diagonal, ``(B, n)``."""
        Q = self.dense()
        return Q.mT @ Q

    def buffers(self) -> dict[str, Tensor]:
        return {part: getattr(self, part) for part in self.parts}


class LeftFactor(Factor):
    """Matrices with a positive diagonal from one Lie group, which move by ``dQ = E Q``."""

    @abstractmethod
    def project(self, tangent: Tangent) -> Projected:
        """What the Lie algebra of this group keeps of the tangent ``S``."""

    @abstractmethod
    def descend_off_diagonal_(self, tangent: Any, step: Tensor, scale: Tensor) -> None:
        """``Q ← scale · (Q − step · E Q)`` for a projected tangent ``E``; the diagonal is written afterwards."""

    @abstractmethod
    def flops(self, columns: int) -> tuple[float, float]:
        """What products take for one matrix and arrays ``(n, columns)``: to fit ``Q``, and for ``P g``.

        Fitting is to find ``a = Q δg`` and ``b = Q⁻ᵀ δθ``, and a step normalised by ``MaxAbs``. A multiply-add counts
        2. Sums, norms and scalings of the arrays, a few for each element, are left out where there are products.
        """

    def descend_(
        self, tangent: Tangent, lr: float | Tensor, normalize: Normalization, usable: Tensor, limit: float
    ) -> None:
        """One normalised step of every usable block; the others keep their bits.

        The diagonal is written last, from ``Q_ii (1 − μ ∇E_ii)`` in elementwise arithmetic: whatever precision the
        matrix products had, it stays positive. A ``Q`` with an element over ``limit`` is scaled down, by a power of
        two; as one normalised step cannot use up the room that is left above the limit, ``Q`` stays finite.
        """
        projected = self.project(tangent)
        # The parts of the tangent have maxima of one: a norm below a millionth would only be a mistake in waiting.
        norm = normalize(projected)
        norm = torch.where(norm > 0, norm.clamp_min(2.0**-20), norm)
        step = torch.where(usable & (norm > 0), lr / norm, 0.0)
        old = self.diagonal()
        new = old * (1 - step[:, None] * projected.diagonal())
        size = torch.stack([largest(buffer) for buffer in self.buffers().values()]).amax(0)
        scale = torch.where(usable & (size > limit), (limit / size).log2().floor().exp2(), 1.0)
        self.descend_off_diagonal_(projected, step[:, None, None], scale[:, None, None])
        self.set_diagonal_((new * scale[:, None]).clamp_min(float(torch.finfo(new.dtype).max) ** -0.375))


class Group:
    """A stack of B elements ``Q = Q_0 ⊗ Q_1 ⊗ …`` acting on arrays of shape ``(B, *shape)``.

    Laws: ``solve(apply(v)) = v``, ``solve_t(apply_t(v)) = v``, ``⟨apply(u), v⟩ = ⟨u, apply_t(v)⟩``, and ``descend_``
    moves along minus the gradient of the criterion that gave the tangent, projected onto the group.

    Args:
        dims: how the group sees a block: its sizes along the axes of the factors
        factors: one for each of ``dims``
    """

    def __init__(self, dims: Sequence[int], factors: Sequence[Factor]) -> None:
        self.dims = tuple(dims)
        self.factors = tuple(factors)

    def apply(self, v: Tensor) -> Tensor:
        return self._along_axes("apply", v)

    def apply_t(self, v: Tensor) -> Tensor:
        return self._along_axes("apply_t", v)

    def solve(self, v: Tensor) -> Tensor:
        return self._along_axes("solve", v)

    def solve_t(self, v: Tensor) -> Tensor:
        return self._along_axes("solve_t", v)

    def a(self, dgrad: Tensor) -> Tensor:
        """A change of the gradient as the local coordinates of the group show it: here ``Q δg``."""
        return self.apply(dgrad)

    def b(self, dtheta: Tensor) -> Tensor:
        """A change of the parameters as the local coordinates of the group show it: here ``Q⁻ᵀ δθ``."""
        return self.solve_t(dtheta)

    def precondition(self, g: Tensor) -> Tensor:
        """``P g = Qᵀ Q g``"""
        return self.apply_t(self.apply(g))

    def precondition_parts(
        self, g: Tensor, keep: bool = False, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``P g`` as an array, and what it still has to be multiplied with, if anything; both ``(B, *dims)``.

        Args:
            g: gradients
            keep: ``Q`` will be used again before it changes
            out: where the array is to be
        """
        v = self.precondition(g)
        return (v if out is None else out.copy_(v.view_as(out))), None

    def _along_axes(self, linear_map: str, v: Tensor) -> Tensor:
        shape = v.shape
        v = v.reshape(shape[0], *self.dims)
        for axis, factor in enumerate(self.factors):
            v = fold(getattr(factor, linear_map)(unfold(v, axis)), axis, v.shape)
        return v.reshape(shape)

    def descend_(
        self,
        tangent: Tangent,
        lr: float | Tensor,
        normalize: Normalization | None = None,
        usable: Tensor | None = None,
    ) -> None:
        """``Q_i ← (I − lr / ‖∇E_i‖ · ∇E_i) Q_i`` for every factor, where ``usable`` (B) is true.

        The tangent is as large as the parameters, and used up: its parts are scaled in place.
        """
        count = tangent.x.shape[0]
        tangent = Tangent(tangent.x.reshape(count, *self.dims), tangent.y.reshape(count, *self.dims))
        informative = tangent.unit_()
        usable = informative if usable is None else usable & informative
        for axis, factor in enumerate(self.factors):
            assert isinstance(factor, LeftFactor)
            factor.descend_(tangent.unfold(axis), lr, normalize or MaxAbs(), usable, self.limit(tangent.x.dtype))
        self._balance_(usable)

    def limit(self, dtype: torch.dtype) -> float:
        """How large the elements of a factor may get, so that ``P`` and ``P⁻¹`` stay well inside the number format."""
        return float(torch.finfo(dtype).max) ** (0.375 / len(self.factors))

    def _balance_(self, usable: Tensor) -> None:
        """Move scale between the factors until all are of one size, so that none over- or underflows.

        By powers of two, whose product is one: ``P`` keeps every bit.
        """
        if len(self.factors) == 1:
            return
        sizes = torch.stack([factor.diagonal().amax(-1) for factor in self.factors])
        logs = sizes.clamp_min(torch.finfo(sizes.dtype).tiny).log2()
        exponents = torch.where(usable, (logs.mean(0) - logs).round(), 0.0)
        exponents[0] -= exponents.sum(0)
        for factor, scale in zip(self.factors, exponents.exp2(), strict=True):
            for buffer in factor.buffers().values():
                buffer.mul_(scale.view(-1, *[1] * (buffer.ndim - 1)))

    def dense(self) -> Tensor:
        """``Q`` as a stack of matrices acting on flattened blocks: for tests and small problems."""
        Q, *rest = (factor.dense() for factor in self.factors)
        for factor in rest:
            Q = torch.stack([torch.kron(q, f) for q, f in zip(Q, factor, strict=True)])
        return Q

    def buffers(self) -> dict[str, Tensor]:
        """The tensors that hold the stack, each with leading dimension B."""
        return {
            f"Q{axis}_{part}": buffer
            for axis, factor in enumerate(self.factors)
            for part, buffer in factor.buffers().items()
        }

    def bind(self, buffers: dict[str, Tensor]) -> Group:
        """The same group over other tensors: ``group.bind(group.buffers())`` equals ``group``."""
        return type(self)(
            self.dims,
            [
                type(factor)(**{part: buffers[f"Q{axis}_{part}"] for part in factor.parts})
                for axis, factor in enumerate(self.factors)
            ],
        )

    def describe(self) -> str:
        return " ⊗ ".join(factor.describe() for factor in self.factors)

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers().values())

    def flops(self, update_every: int = 1) -> list[float]:
        """For each factor what a step of one block takes on average, where ``Q`` is fitted at every so many steps.

        A factor of n of the N elements of a block sees ``N / n`` columns. It is ``fit / update_every + precondition``,
        see ``LeftFactor.flops``. Whitening is meant, or a pair that the probe has found.
        """
        numel = math.prod(self.dims)
        each = []
        for n, factor in zip(self.dims, self.factors, strict=True):
            assert isinstance(factor, LeftFactor)
            fit, precondition = factor.flops(numel // n)
            each.append(fit / update_every + precondition)
        return each


class Structure(ABC):
    """What ``P`` may look like: makes the group for a block of a given shape."""

    def precond_lr(self, whitening: bool) -> float:
        """Step size of ``Q`` where PSGD is not told otherwise: the paper's."""
        return 0.01

    @property
    def inverts(self) -> bool:
        """Whether ``Q`` is inverted to fit it: not in bfloat16."""
        return True

    @property
    def own_normalization(self) -> bool:
        """Whether the step of ``Q`` is normalised in the group's own way, so that there is nothing to choose."""
        return False

    @abstractmethod
    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        """A stack of ``batch`` identities. On the device ``"meta"`` it takes no memory and tells what it would take."""
