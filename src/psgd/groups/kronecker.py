"""Kronecker products: one factor for each axis of a parameter array, ``P = P_0 ⊗ P_1 ⊗ …``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .base import Factor, Group, Structure
from .diagonal import DiagonalFactor
from .triangular import Triangular


@dataclass(frozen=True)
class Kronecker(Structure):
    """One factor for each axis of a block, triangular up to ``max_dense``, diagonal above.

    A matrix of gradients ``G`` is preconditioned as ``P_0 G P_1``. Axes of size one are left out; a scalar gets a
    single number.

    Args:
        max_dense: the longest axis that gets a triangular factor; 0 makes every factor diagonal
    """

    max_dense: int = 2048

    def __post_init__(self) -> None:
        if isinstance(self.max_dense, bool) or not isinstance(self.max_dense, int) or self.max_dense < 0:
            raise ValueError(f"max_dense={self.max_dense!r}: Kronecker wants a whole number of at least 0")

    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        dims = [n for n in shape if n > 1] or [1]
        factors: list[Factor] = []
        for n in dims:
            kind: type[Triangular] | type[DiagonalFactor] = Triangular if n <= self.max_dense else DiagonalFactor
            factors.append(kind.identity(batch, n, dtype, device))
        return Group(dims, factors)
