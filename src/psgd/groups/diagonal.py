"""Diagonal ``Q``: one positive number for each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tangent import DiagonalTangent, Tangent
from .base import Group, LeftFactor, Structure


class DiagonalFactor(LeftFactor):
    """A stack of diagonal matrices, kept as ``(B, n)``."""

    parts = ("diag",)

    def __init__(self, diag: Tensor) -> None:
        self.diag = diag

    @classmethod
    def identity(cls, batch: int, n: int, dtype: torch.dtype, device: torch.device | str) -> DiagonalFactor:
        return cls(torch.ones(batch, n, dtype=dtype, device=device))

    def apply(self, v: Tensor) -> Tensor:
        return self.diag[:, :, None] * v

    apply_t = apply

    def solve(self, v: Tensor) -> Tensor:
        return v / self.diag[:, :, None]

    solve_t = solve

    def project(self, tangent: Tangent) -> DiagonalTangent:
        return DiagonalTangent(tangent.diagonal_alone())

    def descend_off_diagonal_(self, tangent: DiagonalTangent, step: Tensor, scale: Tensor) -> None:
        """Do nothing: there is nothing off the diagonal."""

    def diagonal(self) -> Tensor:
        return self.diag

    def set_diagonal_(self, values: Tensor) -> None:
        self.diag.copy_(values)

    def fault(self) -> tuple[Sequence[str], str] | None:
        return None if super().fault() is None else (self.parts, "it is not positive")

    def flops(self, columns: int) -> tuple[float, float]:
        """FLOPs of elementwise work, as there are no larger products.

        ``a``, ``b``, ``Q v`` and ``Qᵀ v`` cost 1 for each element, the diagonal of ``S`` costs 2, and the step 3 for
        each element of ``Q``.
        """
        n = self.diag.shape[-1]
        return 4 * n * columns + 3 * n, 2 * n * columns

    def P(self) -> Tensor:
        return self.diag.square()

    def dense(self) -> Tensor:
        return self.diag.diag_embed()

    def describe(self) -> str:
        return f"diagonal {self.diag.shape[-1]}"


@dataclass(frozen=True)
class Diagonal(Structure):
    """One positive number for each element of a block.

    This ``P`` uses the least memory, and does not represent interactions between parameters.
    """

    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        n = math.prod(shape)
        return Group((n,), [DiagonalFactor.identity(batch, n, dtype, device)])
