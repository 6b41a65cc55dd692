"""Upper triangular ``Q`` with positive diagonal: the group of the paper's dense preconditioner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..ops import triangular as parallel
from ..ops import triangular_products as products
from ..ops.look import seen
from ..tangent import BLOCK_ROWS, LONGEST, Tangent, is_formed, is_small, looks_at_longest, rows_at_once
from .base import Group, LeftFactor, Structure
from .factor import normal_like

#: rows of a small triangular product in a step of vectors on a CPU, and rows that are handled at a time
CPU_ROWS = 16, 208


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
        return products.multiply(self.full, v)

    def apply_t(self, v: Tensor) -> Tensor:
        return products.multiply_t(self.full, v)

    def solve(self, v: Tensor) -> Tensor:
        return products.solve(self.full, v)

    def solve_t(self, v: Tensor) -> Tensor:
        return products.solve_t(self.full, v)

    def project(self, tangent: Tangent) -> Tangent:
        return tangent

    def descend_off_diagonal_(self, tangent: Tangent, step: Tensor, scale: Tensor) -> None:
        if tangent.columns == 1 and not is_formed(tangent.rows, 1):
            descend_rank_two_(self.full, tangent.x, tangent.y, step, scale)
            return
        # Row i of triu(S) Q needs rows i and below: from the top, each block of rows is read before it is written.
        n = tangent.rows
        for start in range(0, n, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, n)
            E = tangent.upper(start, stop)
            E[:, :, : stop - start].triu_()
            rows = products.multiply_rows(E, self.full[:, start:, start:])
            self.full[:, start:stop, start:].addcmul_(rows, step, value=-1)
        if not seen(scale.device, lambda: scale == 1):
            self.full.mul_(scale)

    def flops(self, columns: int) -> tuple[float, float]:
        """FLOPs for k columns: ``a`` costs ``2 n² k``, the triangular solve of ``b`` half of that, ``P g`` ``4 n² k``.

        In blocks, as large products on a CPU are computed, ``a`` and ``P g`` cost little more than half of that. ``S``
        costs ``2 n² k``; if it is too large to be kept, it is computed twice, for its norm and for the step. The step
        of matrices costs about ``2/3 n³``, in blocks about ``1/3 n³``. The step of vectors, in blocks of r rows, costs
        about ``(4 + r) n²``.
        """
        n, device = self.full.shape[-1], self.full.device
        square = n * n * columns
        formed = is_formed(n, columns)
        if columns == 1 and not formed:
            rows, at_once = _block_rows(device, n)
            rows = min(rows, n)
            looks = looks_at_longest(device, n, columns)
            step = 4 * (LONGEST**2 if looks else products.steps_down(n, rows_at_once(device, n)))
            step += (8 + 2 * rows) * products.steps_down(n, at_once) + 4 * rows * n
        else:
            starts = range(0, n, BLOCK_ROWS)
            step = sum(products.flops(device, n - start, min(BLOCK_ROWS, n - start)) for start in starts)
            # each row from the diagonal on, by two products, once if it is kept and otherwise twice
            of_rows = 4 * columns * products.steps_down(n, BLOCK_ROWS)
            step += 2 * square if is_small(n, columns) else of_rows if formed else 2 * of_rows
        product = products.flops(device, n, columns)
        return product + square + step, 2 * product

    def random_(self, generator: torch.Generator) -> None:
        self.full.copy_(normal_like(self.full, generator).triu_(1) / self.full.shape[-1] ** 0.5)
        self.random_diagonal_(generator)

    def diagonal(self) -> Tensor:
        return self.full.diagonal(dim1=1, dim2=2)

    def set_diagonal_(self, values: Tensor) -> None:
        self.diagonal().copy_(values)

    def dense(self) -> Tensor:
        return self.full

    def fault(self) -> tuple[Sequence[str], str] | None:
        """Fault of the base class, or elements below the diagonal, which products would use and solves would not."""
        below = bool(self.full.tril(-1).any())
        return super().fault() or ((self.parts, "it has elements below its diagonal") if below else None)

    def describe(self) -> str:
        return f"dense {self.full.shape[-1]}"


def descend_rank_two_(
    Q: Tensor, x: Tensor, y: Tensor, step: Tensor, scale: Tensor, block_rows: int | None = None
) -> None:
    """``Q ← scale · (Q − step · triu(x yᵀ + y xᵀ) Q)`` for vectors, in O(n²) and in place.

    With ``U = [x y]`` and ``W = [y x]ᵀ``, row i of the product is ``U_i Σ_{j≥i} W_j Q_j``: for a block of rows a small
    triangular product, and ``U`` times the sum over the rows below. The sums of many blocks are computed first, so that
    one batched product updates all of them. On a GPU a Triton kernel does the same.

    Args:
        block_rows: rows of a small triangular product, or None for the number that is fastest
    """
    U = torch.cat([x, y], -1) * step
    W = torch.cat([y, x], -1).mT
    bs, at_once = _block_rows(Q.device, Q.shape[1], block_rows)
    descend_one_ = parallel.descend_ if parallel.possible(Q) else partial(_from_below_, bs=bs, at_once=at_once)
    for q, u, w, s in zip(Q, U, W, scale, strict=True):
        descend_one_(q, u, w, s)


def _block_rows(device: torch.device, n: int, block_rows: int | None = None) -> tuple[int, int]:
    """Number of rows of a block, and of all blocks that are handled together."""
    if device.type == "cpu":
        rows = block_rows or CPU_ROWS[0]
        return rows, rows * max(1, CPU_ROWS[1] // rows)
    rows = block_rows or 64
    return rows, rows * max(1, -(-(n // rows) // 4))  # no more than a quarter of Q is copied


def _from_below_(Q: Tensor, U: Tensor, W: Tensor, scale: Tensor, bs: int, at_once: int) -> None:
    """Update one matrix by products of torch, without a Triton kernel: ``at_once`` rows at a time, from the last."""
    n = len(Q)
    last = n - n % bs  # rows from here on are less than a block
    blocks, each = last // bs, max(1, at_once // bs)
    rows, u, w = (
        Q[:last].view(blocks, bs, n),
        U[:last].view(blocks, bs, 2),
        W[:, :last].unflatten(1, (blocks, bs)).transpose(0, 1),
    )
    change, is_one = torch.cat([torch.bmm(u, w).triu_(), u], -1), seen(scale.device, lambda: scale == 1)
    if not is_one:
        change.mul_(scale)
    below = W[:, last:] @ Q[last:]  # Σ W_j Q_j over the rows that are done
    rest = Q[last:, last:]
    rest.sub_((U[last:] @ W[:, last:]).triu_() @ rest)
    if not is_one:
        rest.mul_(scale)
    for stop in range(blocks, 0, -each):
        start = max(0, stop - each)
        # Columns to the left of these rows are zero in all of them.
        part, left = rows[start:stop, :, start * bs :], start * bs
        sums = torch.cat([torch.bmm(w[start:stop], part), below[None, :, left:]]).flip(0).cumsum_(0).flip(0)
        below[:, left:] = sums[0]
        old = torch.cat([part, sums[1:]], 1)
        if not is_one:
            part.mul_(scale)
        part.baddbmm_(change[start:stop], old, alpha=-1)


@dataclass(frozen=True)
class Dense(Structure):
    """One triangular ``Q`` for all elements of a block.

    It gives the most general ``P``. For a block of n elements, ``Q`` has n² / 2 numbers to learn.
    """

    universal = True

    def precond_lr(self, whitening: bool, size: int = 1) -> float:
        """Default step size of ``Q``, which is smaller for blocks of more than 400 elements.

        A step is divided by its largest element, so its length grows with the number of its elements.
        """
        return super().precond_lr(whitening, size) * min(1.0, 400 / size)

    def precond_boost(self, whitening: bool) -> float:
        """Default boost, smaller than in other structures for pairs: the first hundred steps could be far too long."""
        return super().precond_boost(whitening) if whitening else 2.0

    @property
    def exact_precond_lr(self) -> float:
        return 0.9

    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        n = math.prod(shape)
        return Group((n,), [Triangular.identity(batch, n, dtype, device)])
