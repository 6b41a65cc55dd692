"""A factor of ``Q``: how a stack of matrices of one Lie group is stored, multiplied, solved and moved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..normalize import Normalization, Projected
from ..ops.look import seen
from ..tangent import Tangent, largest


class Factor(ABC):
    """A stack of B matrices ``Q`` of size n×n.

    All products and solves map arrays of shape ``(B, n, k)`` to arrays of the same shape.
    """

    #: names of the constructor's arguments, which are the tensors that hold ``Q``
    parts: tuple[str, ...]
    #: whether these matrices are one group, so that the product of any two of them is one of them
    one_group: bool = True

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
        """``QᵀQ``, shape ``(B, n, n)``; for diagonal factors only its diagonal, shape ``(B, n)``."""
        Q = self.dense()
        return Q.mT @ Q

    def random_(self, generator: torch.Generator) -> None:
        """Fill the stack with random matrices, well-conditioned and with a positive diagonal, for tests.

        This method assumes that every number is free: it writes normal numbers to all tensors, and then the diagonal.
        A factor whose numbers are not all free, such as a triangular matrix, overrides it.
        """
        diagonal = self.diagonal()
        for buffer in self.buffers().values():
            buffer.copy_(normal_like(buffer, generator) / diagonal.shape[-1] ** 0.5)
        self.random_diagonal_(generator)

    def random_diagonal_(self, generator: torch.Generator) -> None:
        """Write random numbers between 0.5 and 1.5 to the diagonal."""
        old = self.diagonal()
        self.set_diagonal_(torch.rand(old.shape, generator=generator, dtype=old.dtype, device=old.device) + 0.5)

    def buffers(self) -> dict[str, Tensor]:
        return {part: getattr(self, part) for part in self.parts}

    def fault(self) -> tuple[Sequence[str], str] | None:
        """Parts that are finite but from which fitting cannot continue, and the reason; None if it can continue.

        The host may wait for the device. If ``Q`` maps a direction to zero, that direction is lost: every step is a
        product from the left, so ``P`` stays zero there. A zero row or column shows this without a decomposition. A
        factor that can check more overrides this method.
        """
        occupied = self.dense() != 0
        if bool((occupied.any(1) & occupied.any(2)).all()):
            return None
        return self.parts, "it has a row or column of zeros, so that Q has no inverse"


class LeftFactor(Factor):
    """Matrices of one Lie group, with a positive diagonal, that are updated by ``dQ = E Q``."""

    def fault(self) -> tuple[Sequence[str], str] | None:
        """Parts whose diagonal is not positive; no step can make it positive."""
        return None if bool((self.diagonal() > 0).all()) else (self.parts, "its diagonal is not positive")

    @abstractmethod
    def project(self, tangent: Tangent) -> Projected:
        """Projection of the tangent ``S`` onto the Lie algebra of this group."""

    @abstractmethod
    def descend_off_diagonal_(self, tangent: Any, step: Tensor, scale: Tensor) -> None:
        """``Q ← scale · (Q − step · E Q)`` for a projected tangent ``E``; the caller writes the diagonal afterwards."""

    @abstractmethod
    def flops(self, columns: int) -> tuple[float, float]:
        """FLOPs for one matrix and arrays ``(n, columns)``: those of fitting ``Q``, and those of ``P g``.

        Fitting consists of ``a = Q δg``, ``b = Q⁻ᵀ δθ`` and a step normalised by ``MaxAbs``. A multiply-add counts as
        2 FLOPs. Sums, norms and scalings of the arrays cost a few FLOPs for each element; they are left out if there
        are matrix products.
        """

    def descend_(
        self, tangent: Tangent, lr: float | Tensor, normalize: Normalization, usable: Tensor, limit: float
    ) -> None:
        """Take one normalised step with every usable block; other blocks do not change.

        The diagonal is written last, from ``Q_ii (1 − μ ∇E_ii)`` in elementwise arithmetic. It therefore stays
        positive, whatever the precision of the matrix products. A ``Q`` with an element over ``limit`` is scaled down
        by a power of two. One normalised step cannot exceed the range above the limit, so ``Q`` stays finite.
        """
        projected = self.project(tangent)
        norm = normalize(projected)
        moves = usable & (norm > 0)
        # The parts of the tangent have maxima of one: to divide by a norm below a millionth would amplify rounding.
        step = lr / norm.clamp_min(2.0**-20)
        if not seen(step.device, lambda: moves):
            step = torch.where(moves, step, 0.0)
        old = self.diagonal()
        new = old * (1 - step[:, None] * projected.diagonal())
        sizes = [largest(buffer) for buffer in self.buffers().values()]
        size = sizes[0] if len(sizes) == 1 else torch.stack(sizes).amax(0)
        scale = torch.ones_like(size)
        if not seen(size.device, lambda: size <= limit):
            scale = torch.where(usable & (size > limit), (limit / size).log2().floor().exp2(), scale)
            new = new * scale[:, None]
        self.descend_off_diagonal_(projected, step.view(-1, 1, 1), scale.view(-1, 1, 1))
        self.set_diagonal_(new.clamp_min_(float(torch.finfo(new.dtype).max) ** -0.375))


def normal_like(v: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of the shape, dtype and device of a tensor."""
    return torch.randn(v.shape, generator=generator, dtype=v.dtype, device=v.device)
