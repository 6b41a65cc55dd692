"""O(n²) update of a triangular ``Q`` on a GPU: all blocks of rows in parallel, elements read twice and written once.

See ``groups.triangular.descend_rank_two_`` for the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .triton import jit, ready, tl, trial, triton

#: number of rows of a block, and number of its columns that one program handles
ROWS = 64
COLUMNS = 64


def possible(Q: Tensor) -> bool:
    return Q.dtype == torch.float32 and Q.is_contiguous() and ready(Q.device, "blocks")


def descend_(Q: Tensor, U: Tensor, W: Tensor, scale: Tensor) -> None:
    """``Q ← scale · (Q − triu(U W) Q)`` for one matrix, with ``U`` ``(n, 2)`` and ``W`` ``(2, n)``."""
    n = len(Q)
    U, W, scale = U.contiguous(), W.contiguous(), scale.contiguous()
    blocks = triton.cdiv(n, ROWS)
    grid = (triton.cdiv(n, COLUMNS), blocks)
    sums = Q.new_zeros(blocks, 2, n)
    with torch.cuda.device(Q.device):
        _sum_blocks[grid](Q, W, sums, n, ROWS, COLUMNS)
        # Cumulative sums over a block and all blocks below it.
        sums = sums.flip(0).cumsum_(0).flip(0)
        _descend[grid](Q, U, W, sums, scale, n, ROWS, COLUMNS)
    torch.autograd.graph.increment_version(Q)


@trial("blocks", early=False)
def _try_blocks(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    Q = torch.eye(ROWS, device=device)
    descend_(Q, Q[:, :2], Q[:2], Q[0, 0])


@jit
def _sum_blocks(Q, W, sums, n, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """``Σ_j W_j Q_j`` over the rows of each block."""
    b = tl.program_id(1)
    c = tl.program_id(0) * columns + tl.arange(0, columns)
    if (tl.program_id(0) + 1) * columns > b * rows:  # Q is zero to the left of its diagonal block
        j = b * rows + tl.arange(0, rows)
        q = _tile(Q, j, c, n)
        out = sums + b.to(tl.int64) * 2 * n + c
        for k in tl.static_range(2):
            w = tl.load(W + k * n + j, mask=j < n, other=0)
            tl.store(out + k * n, tl.sum(q * w[:, None], 0), mask=c < n)


@jit
def _descend(Q, U, W, sums, scale, n, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Subtract from the rows of a block a small triangular product, and ``U`` times the sum over the rows below."""
    b = tl.program_id(1)
    c = tl.program_id(0) * columns + tl.arange(0, columns)
    if (tl.program_id(0) + 1) * columns > b * rows:
        j = b * rows + tl.arange(0, rows)
        q = _tile(Q, j, c, n)
        below = sums + (b + 1).to(tl.int64) * 2 * n + c
        within = tl.zeros((rows, rows), tl.float32)
        change = tl.zeros((rows, columns), tl.float32)
        for k in tl.static_range(2):
            u = tl.load(U + 2 * j + k, mask=j < n, other=0)
            w = tl.load(W + k * n + j, mask=j < n, other=0)
            within += u[:, None] * w[None, :]
            change += u[:, None] * tl.load(below + k * n, mask=(c < n) & ((b + 1) * rows < n), other=0)[None, :]
        within = tl.where(j[:, None] <= j[None, :], within, 0.0)
        change += tl.dot(within, q, input_precision="ieee")
        place = Q + j.to(tl.int64)[:, None] * n + c[None, :]
        tl.store(place, (q - change) * tl.load(scale), mask=(j < n)[:, None] & (c < n)[None, :])


@jit
def _tile(Q, j, c, n):  # type: ignore[no-untyped-def]
    return tl.load(Q + j.to(tl.int64)[:, None] * n + c[None, :], mask=(j < n)[:, None] & (c < n)[None, :], other=0)
