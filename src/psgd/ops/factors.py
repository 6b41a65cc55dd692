"""Elementwise passes over all factors, for which torch has no kernel that runs at the speed of memory.

They are Triton kernels if Triton is installed, and otherwise torch operations with the same result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .look import seen
from .triton import jit, multiple, ready, tl, trial, triton, wide

#: number of elements that one program of a kernel handles
CHUNK = 4096
#: number of rows of the square tile that one program handles when matrices are transposed
TILE = 64
#: largest number of elements of a block: positions within it are 32-bit numbers
MOST = 2**31 - CHUNK
#: largest number of blocks: CUDA has no more programs along the second axis of a grid
MOST_BLOCKS = 65_535


def _aligned(*sizes_and_tensors: int | Tensor) -> bool:
    """Whether 16 bytes can be read at once: all sizes and the addresses of all tensors are multiples of 16."""
    return all((x.data_ptr() if isinstance(x, Tensor) else x) % 16 == 0 for x in sizes_and_tensors)


def fits_grid(v: Tensor) -> bool:
    """Whether kernels with a program for each block, and for each part of it, can process an array ``(B, *dims)``."""
    return len(v) <= MOST_BLOCKS and v[0].numel() < MOST


def scaled(v: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """``v · scale``, rounded once, into ``out``, which may be ``v`` itself.

    Args:
        v: array ``(B, *dims)``
        scale: one number for each block, or a vector along one axis; it has as many axes as ``v``
        out: output, contiguous and of any dtype
    """
    if not (ready(v.device, "scaled") and v.is_contiguous() and scale.is_contiguous() and fits_grid(v)):
        return torch.mul(v, scale, out=out)
    _launch_scaled(v, scale, out)
    torch.autograd.graph.increment_version(out)
    return out


def _launch_scaled(v: Tensor, scale: Tensor, out: Tensor) -> None:
    """Launch the kernel, which treats a block as a matrix whose rows or columns are scaled."""
    n, after = broadcast(scale, v)
    by_row = after > 1 or n == 1
    columns = after if by_row else n
    rows = v[0].numel() // columns
    width = CHUNK if n == 1 else 256 if columns >= 64 else 16
    height = CHUNK // width
    with torch.cuda.device(v.device):
        grid = (triton.cdiv(rows, height) * triton.cdiv(columns, width), len(v))
        aligned = _aligned(columns, v, out)
        _scaled[grid](v, scale, out, rows, columns, n, by_row, aligned, wide(v.dtype), height, width)


@trial("scaled")
def _try_scaled(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    v = torch.ones(1, 256, 256, dtype=dtype, device=device)
    _launch_scaled(v, v[:, :1, :1].contiguous(), v.to(low))


@trial("scaled")
def _try_scaled_rows(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    v = torch.ones(1, 256, 256, dtype=dtype, device=device)
    _launch_scaled(v, v[:, :, :1].contiguous(), v.to(low))


@trial("scaled")
def _try_scaled_columns(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    v = torch.ones(1, 256, 256, dtype=dtype, device=device)
    _launch_scaled(v, v[:, :1].contiguous(), v.to(low))


@jit
def _scaled(  # type: ignore[no-untyped-def]
    v,
    scale,
    out,
    rows,
    columns,
    n,
    by_row: tl.constexpr,
    aligned: tl.constexpr,
    compute: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    columns = multiple(columns, aligned)
    b = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(columns, width)
    r = tl.program_id(0) // across * height + tl.arange(0, height)
    c = tl.program_id(0) % across * width + tl.arange(0, width)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at = b * rows * columns + r[:, None] * columns + c[None, :]
    if by_row:
        s = tl.load(scale + b * n + r % n).to(compute)[:, None]
    else:
        s = tl.load(scale + b * n + c, mask=c < columns).to(compute)[None, :]
    x = tl.load(v + at, mask=inside).to(compute)
    tl.store(out + at, (x * s).to(out.dtype.element_ty), mask=inside)


def broadcast(scale: Tensor, v: Tensor) -> tuple[int, int]:
    """Numbers ``(n, after)`` such that element ``i`` of a block has the scale at ``(i // after) % n``."""
    axes = [axis for axis in range(1, v.ndim) if scale.shape[axis] > 1]
    assert len(axes) <= 1
    assert len(scale) == len(v)
    if not axes:
        return 1, v[0].numel()
    return v.shape[axes[0]], math.prod(v.shape[axes[0] + 1 :])


def descend_(Q: Tensor, change: Tensor, step: Tensor, diagonal: Tensor | None = None) -> None:
    """``Q ← Q − step · (change − D Q)`` for a stack of matrices, with a diagonal matrix ``D`` or none.

    If its step is zero, a ``Q`` keeps its bits, whatever the change is.

    Args:
        Q: ``(N, n, n)``
        change: ``(N, n, n)``, which may be overwritten
        step: ``(N,)``
        diagonal: diagonals of ``D``, ``(N, n)``, or ``(N, 1)`` for multiples of the identity
    """
    if ready(Q.device, "descend") and Q.is_contiguous() and change.is_contiguous() and fits_grid(Q):
        _launch_descend(Q, change, step.contiguous(), None if diagonal is None else diagonal.contiguous())
        torch.autograd.graph.increment_version(Q)
        return
    step, change = step.view(-1, 1, 1), change.to(Q.dtype)
    if diagonal is not None:
        change = torch.addcmul(change, Q, diagonal.unsqueeze(2).to(Q.dtype), value=-1, out=change)
    if seen(Q.device, lambda: step > 0):
        Q.addcmul_(change, step.to(Q.dtype), value=-1)
    else:
        torch.where(step > 0, torch.addcmul(Q, change, step.to(Q.dtype), value=-1, out=change), Q, out=Q)


def _launch_descend(Q: Tensor, change: Tensor, step: Tensor, diagonal: Tensor | None) -> None:
    n = Q.shape[-1]
    numel = n * n
    each = 0 if diagonal is None else diagonal.shape[1]
    aligned = _aligned(numel, Q, change)
    with torch.cuda.device(Q.device):
        grid = (triton.cdiv(numel, CHUNK), len(Q))
        _descend[grid](
            Q, change, step, step if diagonal is None else diagonal, n, min(each, 2), aligned, wide(Q.dtype), CHUNK
        )


@trial("descend")
def _try_descend(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    Q, one = torch.ones(1, 16, 16, dtype=dtype, device=device), torch.ones(1, device=device)
    _launch_descend(Q, Q.to(low), one, None)


@trial("descend")
def _try_descend_with_diagonal(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    Q, ones = torch.ones(1, 16, 16, dtype=dtype, device=device), torch.ones(1, 16, device=device)
    for diagonal in (ones, ones[:, :1].contiguous()):
        _launch_descend(Q, Q.to(low), ones[0, :1], diagonal)


@jit
def _descend(  # type: ignore[no-untyped-def]
    Q,
    change,
    step,
    diagonal,
    n,
    each: tl.constexpr,
    aligned: tl.constexpr,
    compute: tl.constexpr,
    chunk: tl.constexpr,
):
    """Kernel of ``descend_``; ``each`` is 0 without a diagonal, 1 for one number, 2 for one number per row."""
    numel = multiple(n * n, aligned)
    b = tl.program_id(1).to(tl.int64)
    mu = tl.load(step + b).to(compute)
    i = tl.program_id(0) * chunk + tl.arange(0, chunk)
    moved = (i < numel) & (mu > 0)
    q = tl.load(Q + b * numel + i, mask=moved).to(compute)
    d = tl.load(change + b * numel + i, mask=moved).to(compute)
    if each == 1:
        d -= tl.load(diagonal + b).to(compute) * q
    if each == 2:
        d -= tl.load(diagonal + b * n + i // n, mask=moved).to(compute) * q
    tl.store(Q + b * numel + i, (q - mu * d).to(Q.dtype.element_ty), mask=moved)


def asymmetry(Q: Tensor) -> Tensor:
    """``Q − Qᵀ`` of a stack of matrices."""
    if not (ready(Q.device, "asymmetry") and Q.is_contiguous() and fits_grid(Q)):
        return Q - Q.mT
    return _launch_asymmetry(Q)


def _launch_asymmetry(Q: Tensor) -> Tensor:
    n = Q.shape[-1]
    R = torch.empty_like(Q)
    with torch.cuda.device(Q.device):
        tiles = triton.cdiv(n, TILE)
        _asymmetry[(tiles * tiles, len(Q))](Q, R, n, tiles, _aligned(n, Q), wide(Q.dtype), TILE)
    return R


@trial("asymmetry")
def _try_asymmetry(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    _launch_asymmetry(torch.ones(1, 16, 16, dtype=dtype, device=device))


@jit
def _asymmetry(  # type: ignore[no-untyped-def]
    Q, R, n, tiles, aligned: tl.constexpr, compute: tl.constexpr, tile: tl.constexpr
):
    """Kernel of ``asymmetry``: each program handles one tile on or above the diagonal together with its mirror image.

    Each tile is read and written once, row by row.
    """
    n = multiple(n, aligned)
    row, column = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if row <= column:
        i, j = row * tile + tl.arange(0, tile), column * tile + tl.arange(0, tile)
        start = tl.program_id(1).to(tl.int64) * n * n
        inside, mirrored = (i < n)[:, None] & (j < n)[None, :], (j < n)[:, None] & (i < n)[None, :]
        upper, lower = start + i[:, None] * n + j[None, :], start + j[:, None] * n + i[None, :]
        d = tl.load(Q + upper, mask=inside).to(compute) - tl.trans(tl.load(Q + lower, mask=mirrored).to(compute))
        tl.store(R + upper, d.to(R.dtype.element_ty), mask=inside)
        tl.store(R + lower, -tl.trans(d).to(R.dtype.element_ty), mask=mirrored)
