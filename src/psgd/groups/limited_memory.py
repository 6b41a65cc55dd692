"""Limited-memory triangular ``Q = [[Q11, Q12], [0, Q22]]`` of the paper: triangular, dense and diagonal parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tangent import Tangent, is_small
from .base import Group, LeftFactor, Structure
from .diagonal import DiagonalFactor
from .triangular import Triangular


@dataclass(frozen=True)
class LimitedMemoryTangent:
    """Part of ``S`` that moves ``Q``: all of ``S11`` and ``S12``, and the diagonal of ``S22``."""

    S11: Tensor
    S12: Tensor
    pair: Tangent

    def diagonal(self) -> Tensor:
        return self.pair.diagonal()

    def max_abs(self) -> Tensor:
        largest = torch.maximum(self.S11.abs().amax((1, 2)), self.S12.abs().amax((1, 2)))
        return torch.maximum(largest, self.max_diag())

    def max_diag(self) -> Tensor:
        return self.pair.max_diag()

    def spectral(self) -> Tensor:
        return self.pair.spectral()


class LimitedMemoryFactor(LeftFactor):
    """A stack of ``Q11 (B, r, r)`` upper triangular, ``Q12 (B, r, n − r)`` dense, ``Q22 (B, n − r)`` diagonal."""

    parts = ("Q11", "Q12", "Q22")

    def __init__(self, Q11: Tensor, Q12: Tensor, Q22: Tensor) -> None:
        self.Q11, self.Q12, self.Q22 = Q11, Q12, Q22

    @classmethod
    def identity(
        cls, batch: int, n: int, size: int, dtype: torch.dtype, device: torch.device | str
    ) -> LimitedMemoryFactor:
        return cls(
            Triangular.identity(batch, size, dtype, device).full,
            torch.zeros(batch, size, n - size, dtype=dtype, device=device),
            DiagonalFactor.identity(batch, n - size, dtype, device).diag,
        )

    @property
    def _head(self) -> Triangular:
        return Triangular(self.Q11)

    @property
    def _tail(self) -> Tensor:
        return self.Q22[:, :, None]

    def _split(self, v: Tensor) -> tuple[Tensor, Tensor]:
        size = self.Q11.shape[1]
        return v[:, :size], v[:, size:]

    def apply(self, v: Tensor) -> Tensor:
        head, tail = self._split(v)
        return torch.cat([self._head.apply(head) + self.Q12 @ tail, self._tail * tail], 1)

    def apply_t(self, v: Tensor) -> Tensor:
        head, tail = self._split(v)
        return torch.cat([self._head.apply_t(head), self.Q12.mT @ head + self._tail * tail], 1)

    def solve(self, v: Tensor) -> Tensor:
        head, tail = self._split(v)
        tail = tail / self._tail
        return torch.cat([self._head.solve(head - self.Q12 @ tail), tail], 1)

    def solve_t(self, v: Tensor) -> Tensor:
        head, tail = self._split(v)
        head = self._head.solve_t(head)
        return torch.cat([head, (tail - self.Q12.mT @ head) / self._tail], 1)

    def project(self, tangent: Tangent) -> LimitedMemoryTangent:
        size = self.Q11.shape[1]
        top = tangent.upper(0, size)
        return LimitedMemoryTangent(top[:, :, :size], top[:, :, size:], tangent)

    def descend_off_diagonal_(self, tangent: LimitedMemoryTangent, step: Tensor, scale: Tensor) -> None:
        S11 = tangent.S11.triu()
        self.Q12.addcmul_(S11 @ self.Q12 + tangent.S12 * self.Q22[:, None, :], step, value=-1).mul_(scale)
        self.Q11.addcmul_(S11 @ self.Q11, step, value=-1).mul_(scale)

    def flops(self, columns: int) -> tuple[float, float]:
        """FLOPs with r whole rows and k columns.

        ``a``, ``Q v`` and ``Qᵀ v`` cost ``2 r n k`` each, ``b`` costs ``r² k`` less, the whole rows of ``S`` cost
        ``4 r n k``, or all rows ``2 n² k`` if ``S`` is formed, and the step of ``Q11`` and ``Q12`` costs ``2 r² n``.
        """
        r = self.Q11.shape[1]
        n = r + self.Q22.shape[1]
        of_S = 2 * n * n * columns if is_small(n, columns) else 4 * r * n * columns
        return 4 * r * n * columns - r * r * columns + of_S + 2 * r * r * n, 4 * r * n * columns

    def random_(self, generator: torch.Generator) -> None:
        super().random_(generator)
        self.Q11.triu_()

    def diagonal(self) -> Tensor:
        return torch.cat([self._head.diagonal(), self.Q22], 1)

    def set_diagonal_(self, values: Tensor) -> None:
        size = self.Q11.shape[1]
        self._head.set_diagonal_(values[:, :size])
        self.Q22.copy_(values[:, size:])

    def dense(self) -> Tensor:
        below = torch.zeros_like(self.Q12.mT)
        return torch.cat([torch.cat([self.Q11, self.Q12], 2), torch.cat([below, self.Q22.diag_embed()], 2)], 1)

    def fault(self) -> tuple[Sequence[str], str] | None:
        head, tail = self._head.fault(), DiagonalFactor(self.Q22).fault()
        if head is not None:
            return ("Q11",), head[1]
        return None if tail is None else (("Q22",), tail[1])

    def describe(self) -> str:
        return f"limited memory {self.Q11.shape[-1]} of {self.Q11.shape[-1] + self.Q22.shape[-1]}"


@dataclass(frozen=True)
class LimitedMemory(Structure):
    """A triangular ``Q`` that keeps only its first ``size`` rows in full; the rows below them are diagonal.

    This structure lies between ``Diagonal`` and ``Dense``. For a block of n elements, ``Q`` has about ``(size + 1) n``
    numbers. A block with no more elements than ``size`` gets a dense ``Q``.

    Args:
        size: number of rows and columns of the triangular part ``Q11``
    """

    size: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(
                f"size={self.size!r}: LimitedMemory wants a whole number of at least 1 (Diagonal() is size 0)"
            )

    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        n = math.prod(shape)
        if self.size >= n:
            return Group((n,), [Triangular.identity(batch, n, dtype, device)])
        return Group((n,), [LimitedMemoryFactor.identity(batch, n, self.size, dtype, device)])
