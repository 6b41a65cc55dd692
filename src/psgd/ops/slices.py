"""Slices of scaled arrays, such as rows of a matrix: lengths and products with a vector, in one pass over memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .factors import fits_grid
from .triton import jit, multiple, ready, tl, trial, triton, wide

#: rows and columns of the tile that a program handles at a time, if slices are rows, and if they are columns
ROWS, COLUMNS = (8, 256), (32, 64)


def measure_slices(
    v: Tensor, scale: Tensor, out: Tensor | None = None, x: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Lengths of the slices of ``scale · v``, and the product of each slice with ``x``.

    A slice has one position along the axis of the scale and all positions along the others.

    Args:
        v: array ``(B, *dims)``
        scale: a vector along one axis of two or more; it has as many axes as ``v``
        out: output for ``scale · v``, of any dtype, or None
        x: vectors ``(B, m, 1)`` if ``v`` has two axes besides the first, of which the one without a scale has length
            ``m``, or None

    Returns:
        the lengths, in the shape of the scale and in float32 or better, and the products ``scale · (v · x)`` in the
        same shape, or None without ``x``
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    others = [i for i in range(1, v.ndim) if scale.shape[i] == 1]
    by_row, by_column = scale.shape[1] > 1, scale.shape[-1] > 1
    tensors = [t for t in (v, scale, out, x) if t is not None]
    if (by_row or by_column) and ready(v.device, "slices") and all(t.is_contiguous() for t in tensors) and fits_grid(v):
        lengths = scale.new_empty(scale.shape, dtype=dtype)
        products = None if x is None else torch.empty_like(lengths)
        _launch(v, scale, out, x, lengths, products, by_row)
        if out is not None:
            torch.autograd.graph.increment_version(out)
        return lengths, products
    if out is None:
        lengths = torch.linalg.vector_norm(v, dim=others, keepdim=True, dtype=dtype) * scale
    else:
        torch.mul(v, scale, out=out)
        lengths = torch.linalg.vector_norm(out, dim=others, keepdim=True, dtype=dtype)
    if x is None:
        return lengths, None
    M = v.mT if by_column else v.reshape(len(v), scale[0].numel(), -1)
    return lengths, (torch.bmm(M, x.to(v.dtype)).view_as(scale) * scale).to(dtype)


def _launch(
    v: Tensor,
    scale: Tensor,
    out: Tensor | None,
    x: Tensor | None,
    lengths: Tensor,
    products: Tensor | None,
    by_row: bool,
) -> None:
    rows = v.shape[1] if by_row else math.prod(v.shape[1:-1])
    columns = v[0].numel() // rows
    height, width = ROWS if by_row else COLUMNS
    programs = triton.cdiv(rows, height) if by_row else triton.cdiv(columns, width)
    aligned = columns % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in (v, v if out is None else out))
    with torch.cuda.device(v.device):
        _slices[(programs, len(v))](
            v,
            scale,
            v if out is None else out,
            scale if x is None else x,
            lengths,
            lengths if products is None else products,
            rows,
            columns,
            by_row,
            out is not None,
            x is not None,
            aligned,
            wide(v.dtype),
            height,
            width,
        )


@trial("slices")
def _try_rows(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    v = torch.ones(1, 16, 16, dtype=dtype, device=device)
    _try(v, v[:, :, :1].contiguous(), low, by_row=True)


@trial("slices")
def _try_columns(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    v = torch.ones(1, 16, 16, dtype=dtype, device=device)
    _try(v, v[:, :1].contiguous(), low, by_row=False)


def _try(v: Tensor, scale: Tensor, low: torch.dtype, by_row: bool) -> None:
    wide = torch.promote_types(v.dtype, torch.float32)
    lengths, x = scale.to(wide), torch.ones(1, 16, 1, dtype=wide, device=v.device)
    _launch(v, scale, v.to(low), None, lengths, None, by_row)
    _launch(v, scale, None, None, lengths, None, by_row)
    _launch(v, scale, None, x, lengths, torch.empty_like(lengths), by_row)


@jit
def _slices(  # type: ignore[no-untyped-def]
    v,
    scale,
    out,
    x,
    lengths,
    products,
    rows,
    columns,
    by_row: tl.constexpr,
    rounds: tl.constexpr,
    multiplies: tl.constexpr,
    aligned: tl.constexpr,
    compute: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """Kernel of ``measure_slices``: each program handles some slices of one block, tile by tile.

    A sum is always in the same order, so results are reproducible.
    """
    columns = multiple(columns, aligned)
    b = tl.program_id(1).to(tl.int64)
    r, c = tl.arange(0, height), tl.arange(0, width)
    if by_row:
        r += tl.program_id(0) * height
        s = tl.load(scale + b * rows + r, mask=r < rows, other=0).to(compute)[:, None]
        end = columns
    else:
        c += tl.program_id(0) * width
        s = tl.load(scale + b * columns + c, mask=c < columns, other=0).to(compute)[None, :]
        end = rows
    squares = tl.zeros([height, width], dtype=compute)
    dots = tl.zeros([height, width], dtype=compute)
    for _ in range(0, end, width if by_row else height):
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        at = b * rows * columns + r[:, None] * columns + c[None, :]
        y = tl.load(v + at, mask=inside, other=0).to(compute) * s
        if rounds:
            tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
        squares += y * y
        if multiplies:
            if by_row:
                dots += y * tl.load(x + b * columns + c, mask=c < columns, other=0).to(compute)[None, :]
            else:
                dots += y * tl.load(x + b * rows + r, mask=r < rows, other=0).to(compute)[:, None]
        if by_row:
            c += width
        else:
            r += height
    if by_row:
        at = b * rows + r
        inside = r < rows
        total, product = tl.sum(squares, 1), tl.sum(dots, 1)
    else:
        at = b * columns + c
        inside = c < columns
        total, product = tl.sum(squares, 0), tl.sum(dots, 0)
    tl.store(lengths + at, tl.sqrt(total), mask=inside)
    if multiplies:
        tl.store(products + at, product, mask=inside)
