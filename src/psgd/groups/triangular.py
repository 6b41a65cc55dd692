"""Upper triangular ``Q`` with positive diagonal: the group of the paper's dense preconditioner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tangent import BLOCK_ROWS, Tangent
from .base import Factor, Group, Structure


class Triangular(Factor):
    """A stack of upper triangular matrices, ``(B, n, n)``."""

    parts = ("full",)

    def __init__(self, full: Tensor) -> None:
        self.full = full

    @classmethod
    def identity(cls, batch: int, n: int, dtype: torch.dtype, device: torch.device | str) -> Triangular:
        Q = cls(torch.zeros(batch, n, n, dtype=dtype, device=device))
        Q.diagonal().fill_(1)
        return Q

    def apply(self, v: Tensor) -> Tensor:
        return self.full @ v

    def apply_t(self, v: Tensor) -> Tensor:
        return self.full.mT @ v

    def solve(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.full, v, upper=True)

    def solve_t(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.full.mT, v, upper=False)

    def project(self, tangent: Tangent) -> Tangent:
        return tangent

    def descend_off_diagonal_(self, tangent: Tangent, step: Tensor, scale: Tensor) -> None:
        if tangent.columns == 1:
            descend_rank_two_(self.full, tangent.x, tangent.y, step, scale)
            return
        # Row i of triu(S) Q needs rows i and below: from the top, each block of rows is read before it is written.
        n = tangent.rows
        for start in range(0, n, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, n)
            rows = tangent.upper(start, stop).triu_() @ self.full[:, start:, start:]
            self.full[:, start:stop, start:].addcmul_(rows, step, value=-1).mul_(scale)

    def diagonal(self) -> Tensor:
        return self.full.diagonal(dim1=1, dim2=2)

    def set_diagonal_(self, values: Tensor) -> None:
        self.diagonal().copy_(values)

    def dense(self) -> Tensor:
        return self.full

    def describe(self) -> str:
        return f"dense {self.full.shape[-1]}"


def descend_rank_two_(Q: Tensor, x: Tensor, y: Tensor, step: Tensor, scale: Tensor, block_rows: int = 32) -> None:
    """``Q ← scale · (Q − step · triu(x yᵀ + y xᵀ) Q)`` for vectors, in O(n²) and in place.

    With ``U = [x y]`` and ``W = [y x]ᵀ``, row i of the product is ``U_i Σ_{j≥i} W_j Q_j``. Going up from the last block
    of rows, the sum over the rows below is carried along. Columns left of a block are zero in all of its rows.
    """
    U = torch.cat([x, y], -1) * (step * scale)
    W = torch.cat([y, x], -1).mT
    below = Q.new_zeros(Q.shape[0], 2, Q.shape[2])
    for start in reversed(range(0, Q.shape[1], block_rows)):
        rows = Q[:, start : start + block_rows, start:]
        u, w = U[:, start : start + block_rows], W[:, :, start : start + block_rows]
        sums = below[:, :, start:]
        change = torch.baddbmm(u @ sums, (u @ w).triu_(), rows)
        sums.baddbmm_(w, rows)
        rows.mul_(scale).sub_(change)


@dataclass(frozen=True)
class Dense(Structure):
    """One triangular ``Q`` over all elements of a block: the most general ``P``, with n² / 2 numbers to learn."""

    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        n = math.prod(shape)
        return Group((n,), [Triangular.identity(batch, n, dtype, device)])
