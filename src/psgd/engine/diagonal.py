"""Limits of the steps of blocks with a diagonal factor, which leaves more in a direction than a dense factor does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..groups.base import Preconditioned, joined

if TYPE_CHECKING:
    from .bucket import Bucket

#: largest root mean square of a slice along the axis of the factor, such as the row of an embedding, over ``max_rms``
SLICE = 3.0
#: largest spectral norm of a block, over ``max_rms`` times the spectral norm of white noise
SPECTRUM = 2.0


def limit_slices_(bucket: Bucket, d: Preconditioned, length: Tensor, max_rms: float) -> Tensor:
    """Shorten slices to a root mean square of ``SLICE · max_rms``, see ``Scaled.limit_slices_``.

    Args:
        bucket: bucket of the blocks
        d: ``P m``, whose scales are changed
        length: length of ``P m`` of each block
        max_rms: largest root mean square of a block

    Returns:
        new length of each block
    """
    if all(a.slices is None for a in d.arrays):
        return length
    divisors = _divisors(bucket, d)
    new = [a.limit_slices_(SLICE * max_rms, divisor) for a, divisor in zip(d.arrays, divisors, strict=True)]
    each = zip(new, bucket.split(length), divisors, strict=True)
    return joined(
        [
            old if limited is None else (limited if by is None else limited / by).to(bucket.dtype)
            for limited, old, by in each
        ]
    )


def limit_spectra(bucket: Bucket, d: Preconditioned, limit: Tensor, max_rms: float) -> Tensor:
    """Factor that also limits spectral norms, to ``SPECTRUM · max_rms (√n + √(numel / n))``.

    The last factor is the spectral norm of white noise, with ``n`` the length of the diagonal axis. A diagonal factor
    cannot remove a direction that many slices share: a step with the same root mean square is several times as long in
    it as with a dense factor, and a learning rate that suits dense factors is too large.

    Args:
        bucket: bucket of the blocks
        d: ``P m``
        limit: factor that limits the step of each block
        max_rms: largest root mean square of a block
    """
    axes = [stack.group.scale_axis for stack in bucket.stacks]
    if all(axis is None for axis in axes):
        return limit
    parts = bucket.split(limit)
    each = zip(bucket.stacks, axes, d.arrays, _divisors(bucket, d), strict=True)
    for k, (stack, axis, a, divisor) in enumerate(each):
        norm = None if axis is None else a.spectral_norm(axis)
        if axis is not None and norm is not None:
            norm = norm.to(bucket.dtype) if divisor is None else norm.to(bucket.dtype) / divisor
            n = stack.group.dims[axis]
            white = n**0.5 + (stack.blocks[0].numel / n) ** 0.5
            parts[k] = torch.minimum(parts[k], SPECTRUM * max_rms * white / norm)
    return joined(parts)


def _divisors(bucket: Bucket, d: Preconditioned) -> list[Tensor] | list[None]:
    """Divisors of the blocks of each stack, or None for each."""
    return [None] * len(d.arrays) if d.divisor is None else bucket.split(d.divisor)
