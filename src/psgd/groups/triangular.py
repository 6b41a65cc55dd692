"""Upper triangular ``Q`` with positive diagonal: the group of the paper's dense preconditioner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tangent import BLOCK_ROWS, Tangent, is_formed, steps_down
from .base import Group, LeftFactor, Structure


class Triangular(LeftFactor):
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

    def flops(self, columns: int) -> tuple[float, float]:
        """For k columns ``a`` takes ``2 n² k``, the triangular solve of ``b`` half of that, and ``P g`` ``4 n² k``.

        ``S`` takes ``2 n² k``; where it is too large to be formed, about the same, in rows from the diagonal on, each
        time that it is needed: for its norm and for the step. The step of matrices takes about ``2/3 n³``. That of
        vectors, in blocks of r rows, takes about ``(4 + r) n²``.
        """
        n = self.full.shape[-1]
        square = n * n * columns
        if columns == 1:
            rows, at_once = _block_rows(self.full)
            rows = min(rows, n)
            step = 4 * steps_down(n) + (8 + 2 * rows) * steps_down(n, at_once) + 4 * rows * n
        else:
            step = 2 * steps_down(n, power=2)
            step += 2 * square if is_formed(n, columns) else 8 * columns * steps_down(n)
        return 3 * square + step, 4 * square

    def diagonal(self) -> Tensor:
        return self.full.diagonal(dim1=1, dim2=2)

    def set_diagonal_(self, values: Tensor) -> None:
        self.diagonal().copy_(values)

    def dense(self) -> Tensor:
        return self.full

    def describe(self) -> str:
        return f"dense {self.full.shape[-1]}"


def descend_rank_two_(
    Q: Tensor,
    x: Tensor,
    y: Tensor,
    step: Tensor,
    scale: Tensor,
    block_rows: int | None = None,
    blocks: int | None = None,
) -> None:
    """``Q ← scale · (Q − step · triu(x yᵀ + y xᵀ) Q)`` for vectors, in O(n²) and in place.

    With ``U = [x y]`` and ``W = [y x]ᵀ``, row i of the product is ``U_i Σ_{j≥i} W_j Q_j``. Going up from the last rows,
    the sum over the rows below is carried along. Columns left of the rows at hand are zero in all of them.

    Args:
        block_rows: rows that a small triangular product is taken of; by default what fits a cache
        blocks: how many of them are done side by side: one on a CPU, many on a GPU, which is idle otherwise
    """
    bs, rows_at_once = _block_rows(Q, block_rows, blocks)
    U = torch.cat([x, y], -1) * (step * scale)
    W = torch.cat([y, x], -1).mT
    below = Q.new_zeros(Q.shape[0], 2, Q.shape[2])
    stop = Q.shape[1]
    while stop > 0:
        # Whole blocks side by side; what is left over is done first, by itself.
        size = stop % bs or min(rows_at_once, stop)
        start = stop - size
        rows = Q[:, start:stop, start:]
        u, w, sums = U[:, start:stop], W[:, :, start:stop], below[:, :, start:]
        if size <= bs:
            change = torch.baddbmm(u @ sums, (u @ w).triu_(), rows)
            sums.baddbmm_(w, rows)
        else:
            change = _change_of_blocks(rows, u, w, sums, size // bs)
        rows.mul_(scale).sub_(change)
        stop = start


def _block_rows(Q: Tensor, block_rows: int | None = None, blocks: int | None = None) -> tuple[int, int]:
    """The rows of a block, and of all blocks that are done side by side."""
    parallel = Q.device.type != "cpu"
    rows = block_rows or (64 if parallel else 32)
    return rows, rows * (blocks or (16 if parallel else 1))


def _change_of_blocks(rows: Tensor, u: Tensor, w: Tensor, sums: Tensor, blocks: int) -> Tensor:
    """What is to be subtracted from several blocks of rows; ``sums`` over the rows below is moved up past them."""
    tall = (blocks, rows.shape[1] // blocks)
    rows, u, w = rows.unflatten(1, tall), u.unflatten(1, tall), w.unflatten(2, tall).movedim(2, 1)
    each = w @ rows
    under = each.flip(1).cumsum(1).flip(1).add_(sums[:, None])
    sums.copy_(under[:, 0])
    change = (u @ w).triu_() @ rows
    return change.add_(u @ under.sub_(each)).flatten(1, 2)


@dataclass(frozen=True)
class Dense(Structure):
    """One triangular ``Q`` over all elements of a block: the most general ``P``, with n² / 2 numbers to learn."""

    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        n = math.prod(shape)
        return Group((n,), [Triangular.identity(batch, n, dtype, device)])
