"""Products with stacks of upper triangular matrices ``(B, n, n)`` that skip most of the zeros.

Torch has no product for triangular matrices, so an ordinary product spends half of its work on zeros. In blocks of
rows, each from its first diagonal element on, it costs little more than half. This pays for large matrices on CPUs. On
a GPU, the additional launches would cost more time than the zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: number of rows of a block
ROWS = 80
#: smallest number of multiplications for which a product is divided into blocks
WORTH = 2**23


def in_blocks(Q: Tensor, columns: int) -> bool:
    """Whether a product with arrays ``(B, n, columns)`` is computed block by block; B does not matter."""
    return _in_blocks(Q.device, Q.shape[-1], columns)


def _in_blocks(device: torch.device, n: int, columns: int) -> bool:
    return device.type == "cpu" and n > 2 * ROWS and n * n * columns >= WORTH


def flops(device: torch.device, n: int, columns: int) -> int:
    """FLOPs of ``multiply``, ``multiply_t`` or ``multiply_rows`` for one matrix and that many columns or rows."""
    if not _in_blocks(device, n, columns):
        return 2 * n * n * columns
    return 2 * columns * steps_down(n, ROWS)


def steps_down(n: int, rows: int) -> int:
    """``Σ size · width`` over blocks of rows of an upper triangle, each from its first diagonal element on.

    >>> steps_down(4, rows=2), steps_down(4, rows=1), steps_down(4, rows=4)
    (12, 10, 16)
    """
    return sum(min(rows, n - start) * (n - start) for start in range(0, n, rows))


def multiply(Q: Tensor, v: Tensor) -> Tensor:
    """``Q v`` for upper triangular ``Q``; the result has the memory layout of ``v`` if it was computed in blocks."""
    if not in_blocks(Q, v.shape[-1]):
        return torch.bmm(Q, v)
    out = torch.empty_like(v)
    for start in range(0, v.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        torch.bmm(Q[:, rows, start:], v[:, start:], out=out[:, rows])
    return out


def multiply_t(Q: Tensor, v: Tensor) -> Tensor:
    """``Qᵀ v`` for upper triangular ``Q``; see ``multiply``."""
    if not in_blocks(Q, v.shape[-1]):
        return torch.bmm(Q.mT, v)
    n = v.shape[1]
    out = torch.empty_like(v)
    first = n % ROWS or ROWS  # the last blocks, which are the longest, are whole
    for stop in range(first, n + 1, ROWS):
        start = max(stop - ROWS, 0)
        torch.bmm(Q[:, :stop, start:stop].mT, v[:, :stop], out=out[:, start:stop])
    return out


def multiply_rows(E: Tensor, Q: Tensor) -> Tensor:
    """``E Q`` for rows ``E``, ``(B, r, n)``, of an upper triangle and upper triangular ``Q``, in blocks of columns."""
    if not in_blocks(Q, E.shape[1]):
        return torch.bmm(E, Q)
    n = E.shape[2]
    out = torch.empty_like(E, memory_format=torch.contiguous_format)
    first = n % ROWS or ROWS  # the last blocks, which are the longest, are whole
    for stop in range(first, n + 1, ROWS):
        start = max(stop - ROWS, 0)
        torch.bmm(E[:, :, :stop], Q[:, :stop, start:stop], out=out[:, :, start:stop])
    return out


def solve(Q: Tensor, v: Tensor) -> Tensor:
    """``Q⁻¹ v`` for upper triangular ``Q``.

    For sizes at which products are computed in blocks, the equivalent equations ``xᵀ Qᵀ = vᵀ`` are solved instead,
    because the library needs about half the time for them.
    """
    if not in_blocks(Q, v.shape[-1]):
        return torch.linalg.solve_triangular(Q, v, upper=True)
    return _laid_out_as(v, torch.linalg.solve_triangular(Q.mT, v.mT, upper=False, left=False).mT)


def solve_t(Q: Tensor, v: Tensor) -> Tensor:
    """``Q⁻ᵀ v`` for upper triangular ``Q``; see ``solve``."""
    if not in_blocks(Q, v.shape[-1]):
        return torch.linalg.solve_triangular(Q.mT, v, upper=False)
    return _laid_out_as(v, torch.linalg.solve_triangular(Q, v.mT, upper=True, left=False).mT)


def _laid_out_as(v: Tensor, result: Tensor) -> Tensor:
    """Result in the memory layout of ``v``, as operations on arrays of the same layout are much faster."""
    return result if result.stride() == v.stride() else torch.empty_like(v).copy_(result)
