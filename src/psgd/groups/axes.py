"""Products of stacks of matrices with stacks of arrays, along one axis of the arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.factors import scaled
from ..ops.real import shaped
from ..tangent import unfold


def along(values: Tensor, v: Tensor, axis: int | None = None) -> Tensor:
    """View ``values``, ``(B,)`` or ``(B, n)`` along an axis, so that they multiply ``v``, ``(B, *dims)``."""
    shape = [1] * v.ndim
    shape[0] = len(values)
    if axis is not None:
        shape[axis + 1] = values.shape[1]
    return values.view(shape)


def support(v: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """Slices of ``v`` with a nonzero element: for each axis an array ``(B, n)`` of ones and zeros."""
    size = v.abs().reshape(len(v), *dims)
    axes = range(1, size.ndim)
    each = [size.amax([other for other in axes if other != axis]) if len(dims) > 1 else size for axis in axes]
    return [(largest != 0).to(v.dtype) for largest in each]


def restrict(v: Tensor, slices: Sequence[Tensor]) -> Tensor:
    """``v`` with zeros outside of the given slices, see ``support``."""
    shape = v.shape
    v = v.reshape(len(v), *(each.shape[1] for each in slices))
    for axis, each in enumerate(slices):
        v = v * along(each, v, axis)
    return v.reshape(shape)


def multiply_axes(matrices: Sequence[tuple[Tensor, int]], v: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply ``v`` by matrices, or by diagonals, each along its own axis, one after the other."""
    for k, (M, axis) in enumerate(matrices):
        v = multiply_axis(M, v, axis, out if k == len(matrices) - 1 else None)
    return v


def multiply_axis(M: Tensor, v: Tensor, axis: int, out: Tensor | None = None) -> Tensor:
    """Multiply ``v`` by a matrix, or by a diagonal, along an axis, without moving axes in memory.

    ``out`` may have a more precise dtype than the matrix and ``v``.
    """
    if M.ndim == 2:
        return torch.mul(v, along(M, v, axis), out=out)
    shape = v.shape
    count, n = shape[0], shape[axis + 1]
    before, after = math.prod(shape[1 : axis + 1]), math.prod(shape[axis + 2 :])
    if before == 1:
        flat: tuple[int, ...] = (count, n, after)
        left, right = M, shaped(v, flat)
    elif after == 1:
        flat = (count, before, n)
        left, right = shaped(v, flat), M.mT
    else:
        flat = (count, before, n, after)
        product = torch.matmul(M[:, None], v.reshape(flat)).view(shape)
        return product if out is None else out.copy_(product)
    if out is None:
        return shaped(torch.bmm(left, right), shape)
    product_(left, right, out.view(flat))
    return out.view(shape)


def gram_(v: Tensor, axis: int, out: Tensor, scale: Tensor | None = None, add: bool = False) -> None:
    """Write ``V Vᵀ`` to ``out (B, n, n)``, or the roots of its diagonal to ``out (B, n)``.

    ``V`` is ``scale · v`` unfolded along ``axis``. With ``add``, a matrix is added to ``out`` instead. The scale runs
    along the axis with a diagonal factor, see ``InverseFree.scale_axis``.
    """
    if out.ndim == 2:
        along_others = [i for i in range(1, v.ndim) if i != axis + 1]
        if scale is not None and scale.shape[axis + 1] == 1:
            v, scale = v * scale, None
        if along_others:
            torch.linalg.vector_norm(v, dim=along_others, dtype=out.dtype, out=out)
        else:
            out.copy_(v)
        if scale is not None:
            out.mul_(scale.view_as(out))
        return
    V = seen_along(rounded(v, scale), axis)
    product_(V, V.mT, out, add)


def rounded(v: Tensor, scale: Tensor | None) -> Tensor:
    """``scale · v`` in the dtype of estimates."""
    return low(v) if scale is None else scaled(v, scale, torch.empty_like(v, dtype=low_dtype(v)))


def seen_along(v: Tensor, axis: int) -> Tensor:
    """``v`` unfolded along an axis, ``(B, n, columns)``, without a copy for the first and the last axis."""
    last = axis == v.ndim - 2 and axis > 0
    return v.reshape(v.shape[0], -1, v.shape[-1]).mT if last else unfold(v, axis)


def product_(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """``out ← left @ right``, or ``out ← out + left @ right``; ``out`` may have a more precise dtype."""
    beta = int(add)
    if left.dtype == out.dtype:
        torch.baddbmm(out, left, right, beta=beta, out=out)
    else:
        torch.baddbmm(out, left, right, out_dtype=out.dtype, beta=beta, out=out)


def low_dtype(v: Tensor) -> torch.dtype:
    """Dtype in which estimates from one gradient are computed: bfloat16 if float32 products may be rounded anyway."""
    return lower(v.device, v.dtype)


def lower(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    # Torch has several settings for this precision, and reading one raises if it was set by another; this one does not.
    # Torch before 2.9 lacks it, and torch before 2.8 lacks products with a more precise result: estimates then keep
    # their dtype.
    rounded = device.type == "cuda" and getattr(torch.backends.cuda.matmul, "fp32_precision", None) == "tf32"
    return torch.bfloat16 if rounded and dtype == torch.float32 else dtype


def low(v: Tensor) -> Tensor:
    return v.to(low_dtype(v))
